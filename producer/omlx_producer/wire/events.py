"""What workers write: the events of a job, and the model behind an alias.

See `omlx_producer.wire` for the keys and the order of events.
"""

from __future__ import annotations

import codecs
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from omlx_producer.wire.end import End
from omlx_producer.wire.json_limits import read_json
from omlx_producer.wire.markup import Markup
from omlx_producer.wire.remedy import Remedy

FinishReason = Literal["stop", "length", "tool_calls", "repetition"]

CUTS: tuple[FinishReason, ...] = ("length", "repetition")
"""Those of texts that the model has not ended."""


class Wire(BaseModel):
    """The base of what workers write. It ignores unknown fields, for workers that are newer."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


Alternative = tuple[str, int, float] | tuple[str, int, float, list[int]]
"""A likely token: its text, id and log-probability, and its bytes in the case of `TokenLogprob`."""


class TokenLogprob(Wire):
    """A sampled token and its log-probability: natural, before filters and temperature.

    Attributes:
        token: its text, with each byte that is part of a character as ``\\xe2``.
        bytes: what it writes, if that has such a part.
        top: the likeliest tokens.

    >>> TokenLogprob(token="def", token_id=750, logprob=-0.25).logprob
    -0.25
    """

    token: str
    token_id: int
    logprob: float
    bytes: list[int] | None = None
    top: list[Alternative] = []

    @property
    def in_chat(self) -> dict[str, Any]:
        """OpenAI's form of it in chat completions."""
        top = [_in_chat(token, logprob, *part) for token, _, logprob, *part in self.top]
        return {**_in_chat(self.token, self.logprob, self.bytes), "top_logprobs": top}

    @property
    def written(self) -> list[int]:
        """The bytes that it writes, in any case."""
        return _written(self.token, self.bytes)


class PromptLogprob(TokenLogprob):
    """A token of a prompt and its log-probability, by the model's own logits.

    Attributes:
        rank: 1 for the likeliest token; 0 for a prompt's first token, which nothing scores.

    >>> scored = PromptLogprob(token="def", token_id=750, logprob=-0.25, rank=1)
    >>> scored.in_vllm
    {'750': {'logprob': -0.25, 'rank': 1, 'decoded_token': 'def'}}
    """

    rank: int

    @property
    def in_vllm(self) -> dict[str, Any] | None:
        """vLLM's form of it: the likeliest tokens and this one, by their ids."""
        if not self.rank:
            return None
        told = {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}
            for rank, (text, token, logprob, *_) in enumerate(self.top, 1)
        }
        own = {"logprob": self.logprob, "rank": self.rank, "decoded_token": self.token}
        return {str(self.token_id): own} | told


class TextLogprobs:
    """OpenAI's form in text completions, of one choice's tokens as they come."""

    def __init__(self) -> None:
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The form of some tokens; their offsets go on from those before."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(bytes(entry.written)))
        return {
            "tokens": [entry.token for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{token: logprob for token, _, logprob, *_ in e.top} for e in entries],
            "text_offset": offsets,
        }


def _in_chat(token: str, logprob: float, part: list[int] | None = None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": _written(token, part)}


def _written(token: str, part: list[int] | None) -> list[int]:
    return part or list(token.encode())


def token_digest(tokens: Sequence[int], before: int = 0) -> int:
    """The CRC-32 of tokens as little-endian numbers of 32 bits, going on from that of others.

    >>> token_digest([1, 2, 3]) == token_digest([3], token_digest([1, 2]))
    True
    """
    return zlib.crc32(struct.pack(f"<{len(tokens)}I", *tokens), before)


class ChoiceDelta(Wire):
    """What a choice has got since the event before. ``text`` may lag behind ``tokens``, never lead.

    Attributes:
        start: tokens of the choice before these.
        offset: characters of the choice before this text.
        digest: the `token_digest` of the choice's tokens, these among them.
        drafted: the parts of ``text`` that accepted drafts wrote, as starts and ends. Left out if
            there are none, of jobs that do not stream, and of events that are written again.
        marks: places in the choice's whole text at which tokens begin that may write a marker of
            `Markup.by_token`.

    >>> ChoiceDelta(index=0, text="def", tokens=[750]).text
    'def'
    """

    index: int
    text: str
    tokens: list[int]
    start: int = 0
    offset: int = 0
    digest: int | None = None
    logprobs: list[TokenLogprob] | None = None
    drafted: list[tuple[int, int]] | None = None
    marks: list[int] | None = None


@dataclass(slots=True)
class ReadChoice:
    """How much of a choice a consumer has received.

    Attributes:
        text: characters.
        digest: of the tokens; None while some of them are unknown, from before a cursor.
        mark: the last one.
    """

    tokens: int = 0
    text: int = 0
    digest: int | None = 0
    mark: int = -1

    def go_on(self, delta: ChoiceDelta) -> ChoiceDelta:
        """Take in a delta; returns the part of it that is new.

        Raises:
            ValueError: if its tokens do not continue those that were received.
        """
        skip = self.tokens - delta.start
        tokens, text = delta.tokens[skip:], delta.text[self.text - delta.offset :]
        if skip <= len(delta.tokens):
            if self.digest is not None and token_digest(tokens, self.digest) != delta.digest:
                raise ValueError(f"choice {delta.index} differs")
            self.digest = delta.digest
        if skip or self.text > delta.offset:
            delta = ChoiceDelta(
                index=delta.index,
                text=text,
                tokens=tokens,
                start=self.tokens,
                offset=self.text,
                digest=self.digest,
                logprobs=(delta.logprobs or [])[skip:] or None,
                marks=[mark for mark in delta.marks or () if mark > self.mark] or None,
            )
        self.tokens, self.text = self.tokens + len(tokens), self.text + len(text)
        self.mark = max((self.mark, *(delta.marks or ())))
        return delta


class FunctionCall(Wire):
    """A function and its arguments, which are a JSON object as text."""

    name: Annotated[str, Remedy("the name of a function")]
    arguments: Annotated[str, Remedy("a JSON object as text")]

    @property
    def parsed(self) -> Any:
        """The arguments; {} for none, None if they are not JSON."""
        try:
            return read_json(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None


class ToolCall(Wire):
    """One call of a tool by the assistant.

    >>> call = ToolCall(id="call_1", function={"name": "f", "arguments": '{"x": 5}'})
    >>> call.function.parsed["x"]
    5
    """

    id: str
    type: Literal["function"] = "function"
    function: Annotated[
        FunctionCall,
        Remedy('a function and its arguments such as {"name": "f", "arguments": "{}"}'),
    ]


class Speculation(Wire):
    """The drafts of a job, all choices together.

    Attributes:
        steps: summed over the rows.
        accepted: drafts accepted at each position of a step, the first position first.
    """

    steps: int = 0
    drafted: int = 0
    accepted: list[int] = []


class PromptTokensDetails(Wire):
    """How a prompt was read.

    Attributes:
        cached_tokens: tokens that no choice had to read: the worker had kept them from earlier
            prompts with the same prefix. Of an interrupted job, those of its last run.
    """

    cached_tokens: int = Field(default=0, ge=0)


class CompletionTokensDetails(Wire):
    """What the tokens of a text were.

    Attributes:
        reasoning_tokens: those that are thinking, markers not counted.
    """

    reasoning_tokens: int = Field(default=0, ge=0)


class Usage(Wire):
    """The token counts of a finished job, all choices together; the prompt counts once.

    >>> producer.submit(prompt="def f(x):").result().usage.prompt_tokens
    9
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()
    speculation: Speculation = Speculation()


class TokensEvent(Wire):
    """The new tokens since the event before. ``n`` counts the tokens of the job so far.

    Attributes:
        markup: the markers in the texts of a chat; only in the first event of a job.
        head: of the answer, see `omlx_producer.wire.answer`; likewise.

    >>> job = producer.submit(prompt="def f(x):")
    >>> steps = [event for event in job.stream() if isinstance(event, TokensEvent)]
    >>> "".join(step.choices[0].text for step in steps) == job.result().text
    True
    """

    type: Literal["tokens"] = "tokens"
    job_id: str
    n: int = Field(ge=1)
    choices: list[ChoiceDelta]
    markup: Markup | None = None
    head: dict[str, Any] | None = None

    @property
    def since(self) -> int:
        """The ``n`` of the event before this one."""
        return self.n - max(1, sum(len(choice.tokens) for choice in self.choices))

    @property
    def stream_id(self) -> str:
        return f"{self.n}-0"


class EndEvent(Wire):
    """The end of a job, the last event of its stream.

    Attributes:
        type: ``done``, ``failed`` or ``cancelled``: `State.type`.
        error: the end as one sentence, "" of a job that finished.
        code: see `End`, as for ``field`` and ``remedy``. Older workers tell that of failures alone.
        finish_reasons: by choice.
        choices: empty deltas at the end of each choice, if the job published its tokens.
        tool_calls: by choice; empty if none has any.
        usage: of a job that finished.
        head: of its answer, if no event before told it.

    >>> job = producer.submit(prompt="def f(x):", n=2)
    >>> *_, last = job.stream()
    >>> last.type, last.end.ok, len(last.finish_reasons)
    ('done', True, 2)
    """

    type: Literal["done", "failed", "cancelled"]
    job_id: str
    n: int = Field(ge=0)
    code: str = ""
    error: str = ""
    field: str = ""
    remedy: str = ""
    finish_reasons: list[FinishReason] = []
    choices: list[ChoiceDelta] = []
    tool_calls: list[list[ToolCall]] = []
    usage: Usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    head: dict[str, Any] | None = None

    @classmethod
    def of(cls, job_id: str, n: int, end: End, **answer: Any) -> EndEvent:
        """The event of an end after ``n`` tokens.

        Args:
            answer: what the event says of a job that finished.
        """
        told = {"code": end.code, "error": str(end), "field": end.field, "remedy": end.remedy}
        document = {"type": end.state.type, "job_id": job_id, "n": n}
        return cls.model_validate(document | told | answer)

    @property
    def stream_id(self) -> str:
        return f"{self.n}-1"

    @property
    def end(self) -> End:
        """Why the job has no answer, or that it has one; never with the body."""
        usual = "finished" if self.type == "done" else self.type
        return End.read(usual, self.code, self.error, self.field, self.remedy)


JobEvent = TokensEvent | EndEvent

_EVENT: TypeAdapter[JobEvent] = TypeAdapter(Annotated[JobEvent, Field(discriminator="type")])


def parse_event(payload: bytes | str) -> JobEvent:
    """Parse the event of a stream entry or a channel message."""
    return _EVENT.validate_json(payload)


class ModelInfo(Wire):
    """The entry of a model in the hash ``MODELS_KEY``, under its alias.

    It outlives the worker, so jobs can be queued for a Mac that is asleep.

    Attributes:
        longest_token: characters of the longest token. It bounds the tokens of a text from below.
        draft_depth: drafts per step, at most; 0 if it never drafts. Older workers leave it out.
        system_fingerprint: a hash of weights and tokenizer. Older workers leave it out.
        announced_at: when a worker last announced it, in seconds since 1970 on the server's clock.
            Workers that run announce it every 15 seconds; older ones leave this out.
        chat_template: whether the checkpoint has one, so that it takes messages. Older workers
            leave it out.
        vector_size: numbers of its vectors; 0 if it generates text.
        markers: tokens that mark parts of its chats, such as ``<|channel|>``. No answer should hold
            their text. Older workers leave them out.
        picture_tokens: the most that one picture takes of the context; 0 if it takes no pictures.

    >>> [info.context_length for info in producer.models().values()]
    [10000]
    """

    model: str
    context_length: int = Field(ge=1)
    longest_token: int = Field(ge=1)
    draft_depth: int | None = None
    system_fingerprint: str | None = None
    announced_at: float = 0.0
    chat_template: bool = True
    vector_size: int = 0
    markers: tuple[str, ...] = ()
    picture_tokens: int = 0
