"""What workers tell: the events of a job, and what model an alias stands for.

See `omlx_producer.protocol` for where and in which order events travel.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

FinishReason = Literal["stop", "length"]


class _Wire(BaseModel):
    """What workers write. Unknown fields are ignored: a worker may be newer than a consumer."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class TokenLogprob(_Wire):
    """A sampled token and its log-probability (natural log, before filters and temperature)."""

    token: str
    token_id: int
    logprob: float
    top: list[tuple[str, int, float]] = []


class ChoiceDelta(_Wire):
    """What one step added to one choice; ``text`` may lag behind ``tokens``, never lead."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class Speculation(_Wire):
    """How a job's drafts fared, all choices together.

    ``steps`` counts each row's steps; ``accepted`` says for each draft position, the first
    token drafted in a step first, how many drafts were accepted there.
    """

    steps: int = 0
    drafted: int = 0
    accepted: list[int] = []


class Usage(_Wire):
    """Token counts of a finished job, all choices together."""

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
    """Read an event from a stream entry or a channel message."""
    return _EVENT.validate_json(payload)


class ModelInfo(_Wire):
    """What a worker writes about its model under its alias in the hash ``MODELS_KEY``.

    The entry outlives the worker, so that jobs can be queued for a Mac that is asleep.
    ``longest_token`` is the length in characters of the longest token, which bounds from below
    how many tokens a text can become.
    """

    model: str
    context_length: int = Field(ge=1)
    longest_token: int = Field(ge=1)
