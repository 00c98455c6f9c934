"""What travels between producers, Redis and workers: requests, events, results, names.

One RQ job carries one generation request. Its function is named ``JOB_FUNCTION``, its only
keyword argument is ``request``, the JSON form of a `GenerationRequest`, and it is written with
RQ's JSON serializer. Workers refuse anything else; nothing is ever unpickled.

A worker writes every event of a job twice in one script call: as an entry of the stream
``events_key(job_id)`` (field ``event``) and as a message on the channel
``tokens_channel(job_id)``; both hold the same JSON document, one of:

``tokens``     new tokens of one step: ``n`` is the number of tokens of the job so far,
               ``choices`` the choices that moved (`ChoiceDelta`)
``done``       the job finished: ``finish_reasons`` by choice, and ``usage``
``failed``     the job failed: ``error`` is one sentence
``cancelled``  the job was cancelled or stopped: ``error`` says by what

The last three are terminal: exactly one of them ends a stream. Stream ids are token counts:
a ``tokens`` event has the id ``<n>-0``, the terminal event ``<n>-1``, so ids only grow, Redis
itself refuses a late writer, and a consumer's cursor is a count of tokens. Concatenating the
``text`` of one choice over all events gives exactly the text in the result.

The result (``job.return_value()``) is an OpenAI response body: a ``chat.completion`` for
``messages``, a ``text_completion`` for ``prompt``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

JOB_FUNCTION = "omlx_worker.jobs.generate"
MODELS_KEY = "omlx:models"

Priority = Literal["high", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
FinishReason = Literal["stop", "length"]

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIASES = 1024
MAX_PROMPT_CHARACTERS = 8_000_000
DEFAULT_MAX_TOKENS = 256


def queue_name(model: str, priority: Priority) -> str:
    """The RQ queue that holds the jobs of a model alias at one priority."""
    return f"omlx:{model}:{priority}"


def events_key(job_id: str) -> str:
    """The Redis stream that keeps the events of a job until its result expires."""
    return f"omlx:events:{job_id}"


def tokens_channel(job_id: str) -> str:
    """The pub/sub channel on which the events of a job appear as they happen."""
    return f"omlx:tokens:{job_id}"


def wake_channel(model: str) -> str:
    """The channel on which producers ring for the workers of a model alias; any payload."""
    return f"omlx:wake:{model}"


class InvalidRequest(ValueError):
    """A request that can never be served. The message is one sentence for the user."""


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(_Wire):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Wire):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ResponseFormat(_Wire):
    """The form of the answer; free text is the only one served."""

    type: Literal["text"]


ModelAlias = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._@/-]+$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationRequest(_Wire):
    """One generation request, in OpenAI's names; see the module for where it travels.

    Sampling fields left at ``None`` take the model's ``generation_config.json``, then OpenAI's
    defaults. ``top_p``, ``min_p`` and ``top_k`` keep the tokens of the untempered distribution
    that mlx-lm's `make_sampler` keeps; the penalties count the prompt and everything generated.
    A request without a seed is given one made from its job id, so that a retry repeats it.
    """

    model: ModelAlias
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    prompt: (
        Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
        | Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
        | None
    ) = None
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_LOGIT_BIASES
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_STRINGS)] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fold_aliases(cls, data: Any) -> Any:
        if isinstance(data, dict) and "max_tokens" in data:
            if data.get("max_completion_tokens") is not None:
                raise ValueError("max_tokens and max_completion_tokens are the same; give one")
            data = dict(data)
            data["max_completion_tokens"] = data.pop("max_tokens")
        return data

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give exactly one of messages and prompt")
        if self.messages is not None:
            characters = sum(len(message.text) for message in self.messages)
            if characters == 0:
                raise ValueError("messages are empty; give at least one with text")
            if characters > MAX_PROMPT_CHARACTERS:
                raise ValueError(
                    f"messages have {characters} characters; at most {MAX_PROMPT_CHARACTERS} fit"
                )
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and int(key) < 2**31):
                raise ValueError(f"logit_bias has the key {key[:40]!r}; keys are token ids")
        return self

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @classmethod
    def parse(cls, data: Any) -> GenerationRequest:
        """Validate a decoded JSON document or keyword arguments.

        Raises:
            InvalidRequest: with one sentence that names the field, the value and the remedy.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidRequest(describe(error)) from None

    def to_wire(self) -> dict[str, Any]:
        """The JSON form, without fields left at their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)


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


class Usage(_Wire):
    """Token counts of a finished job, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokensEvent(_Wire):
    type: Literal["tokens"] = "tokens"
    job_id: str
    n: int = Field(ge=1)
    choices: list[ChoiceDelta]

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
    context_length: int
    longest_token: int


def describe(error: ValidationError) -> str:
    """The first problem of a validation error as one sentence: field, value, remedy."""
    problems = error.errors(include_url=False)
    # A union reports every branch that failed; the deepest is the one the user meant.
    problem = max(problems, key=lambda p: len(p["loc"])) if len(problems) > 1 else problems[0]
    field = ".".join(str(part) for part in problem["loc"] if not _is_branch(part))
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown field; remove it"
    message = problem["msg"].removeprefix("Value error, ")
    if not field:
        return message[:1].lower() + message[1:]
    if problem["type"] == "missing":
        return f"{field}: missing; it is required"
    value = repr(problem["input"])
    value = value if len(value) <= 60 else value[:57] + "..."
    return f"{field}: got {value}; {message[:1].lower() + message[1:]}"


def _is_branch(part: int | str) -> bool:
    """Whether a location part names a branch of a union instead of a field or an index."""
    return isinstance(part, str) and ("[" in part or part in {"str", "int", "float", "bool"})
