"""What workers write: the events of a job, and the model behind an alias.

See `omlx_producer.protocol` for the keys and the order of events.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

FinishReason = Literal["stop", "length"]


class _Wire(BaseModel):
    """The base of what workers write. It ignores unknown fields, for workers that are newer."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class TokenLogprob(_Wire):
    """A sampled token and its log-probability: natural, before filters and temperature."""

    token: str
    token_id: int
    logprob: float
    top: list[tuple[str, int, float]] = []


class ChoiceDelta(_Wire):
    """What one step added to a choice. ``text`` may lag behind ``tokens``, never lead."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class Speculation(_Wire):
    """The drafts of a job, all choices together.

    Attributes:
        steps: summed over the rows.
        accepted: drafts accepted at each position of a step, the first position first.
    """

    steps: int = 0
    drafted: int = 0
    accepted: list[int] = []


class Usage(_Wire):
    """The token counts of a finished job, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: Speculation = Speculation()


class TokensEvent(_Wire):
    type: Literal["tokens"] = "tokens"
    job_id: str
    n: int = Field(ge=1)
    choices: list[ChoiceDelta]

    @property
    def since(self) -> int:
        """The ``n`` of the event before this one."""
        return self.n - max(1, sum(len(choice.tokens) for choice in self.choices))

    @property
    def stream_id(self) -> str:
        return f"{self.n}-0"


class _TerminalEvent(_Wire):
    job_id: str
    n: int = Field(ge=0)

    @property
    def stream_id(self) -> str:
        return f"{self.n}-1"


class DoneEvent(_TerminalEvent):
    type: Literal["done"] = "done"
    finish_reasons: list[FinishReason]
    usage: Usage


class FailedEvent(_TerminalEvent):
    type: Literal["failed"] = "failed"
    error: str


class CancelledEvent(_TerminalEvent):
    type: Literal["cancelled"] = "cancelled"
    error: str


TerminalEvent = DoneEvent | FailedEvent | CancelledEvent
TokenEvent = TokensEvent | TerminalEvent

_EVENT: TypeAdapter[TokenEvent] = TypeAdapter(Annotated[TokenEvent, Field(discriminator="type")])


def parse_event(payload: bytes | str) -> TokenEvent:
    """Parse the event of a stream entry or a channel message."""
    return _EVENT.validate_json(payload)


class ModelInfo(_Wire):
    """The entry of a model in the hash ``MODELS_KEY``, under its alias.

    It outlives the worker, so jobs can be queued for a Mac that is asleep.

    Attributes:
        longest_token: characters of the longest token. It bounds the tokens of a text from below.
        draft_depth: drafts per step, at most; 0 if it never drafts. Older workers leave it out.
    """

    model: str
    context_length: int = Field(ge=1)
    longest_token: int = Field(ge=1)
    draft_depth: int | None = None
