"""Rows as an engine takes them, and what it reports of them. This module imports no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import FinishReason, PromptLogprob, RepetitionDetection, TokenLogprob
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.thinking import Thinking

if TYPE_CHECKING:
    from omlx_worker.engine.rows.constraints import Grammar

Source = Literal["model", "lookup", "grammar"]
"""Who drafts: the model itself by its head or draft model, a lookup in its own text, or a grammar
that leaves one way to go on."""

Cut = Literal["failed", "slow"]

SOURCES: tuple[Source, ...] = ("model", "lookup", "grammar")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row samples, every default resolved. See `omlx_worker.engine.ragged.sampling`.

    Attributes:
        temperature: 0 takes the most likely token.
        filters: those that leave tokens out, by the names in `FILTERS`.
        repetition_penalty: 1 changes nothing.
        logit_bias: added to the logits, by token id.
        seed: 64 bits; the same seed gives the same tokens in any batch.
        top_logprobs: alternatives reported per token; None reports no log-probabilities.
        thinking: how its thinking is told, and its budget; None if the model marks none.
    """

    temperature: float = 1.0
    filters: dict[str, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    top_logprobs: int | None = None
    thinking: Thinking | None = None

    @property
    def bare(self) -> bool:
        """Whether the likeliest token of the model's own logits is all that is asked for."""
        asks = self.temperature or self.penalises or self.logit_bias or self.thinking
        return not asks and self.top_logprobs is None

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Target(NamedTuple):
    """A token of which a row tells the log-probability.

    Attributes:
        place: tokens of the row before it.
        choices: those of a decision that it counts for, by their places in the request.
    """

    place: int
    token: int
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to generate: a job of ``n`` choices becomes ``n`` rows.

    Attributes:
        row_id: unique among the engine's rows.
        prompt: token ids, at least one.
        max_tokens: fits the context together with the prompt; 0 if the prompt is only scored.
        stop_strings: text that ends the row and is not part of its text.
        stop_tokens: token ids that end the row and are not part of its text.
        repetition: when it ends because it repeats itself; None for never.
        reply: how its text is read; None for plain text.
        trims: whether a space that begins its text belongs to the template of a chat, as with
            tokenizers whose decoders drop it.
        depth: most drafts a step; 0 for none, None for the engine's own limit.
        generated: tokens that an interrupted or paused run has produced, oldest first. They are
            read after the prompt, count towards ``max_tokens`` and penalties, and are not
            emitted again.
        cache: whether its prompt may be taken from the prefix cache and kept there.
        salt: rows share prompts with rows of the same salt alone.
        marks: lengths of beginnings that later prompts may share, such as a system message's.
        goes_on: whether a later prompt may begin with this one and its text.
        grammar: what the text must match, compiled; None for free text.
        grammar_field: the request's field that it comes from, for errors.
        prompt_logprobs: alternatives reported with each scored token of the prompt; None does not
            score the prompt.
        targets: what is scored in place of the prompt's own tokens, in the order of their places.
        echo: the text of a prompt that is repeated before its own. Then its log-probabilities
            include those of the stop token that ends it. None repeats nothing.
        vector: numbers of the vector that its prompt is read for; 0 for a row that generates.
        whole: whether its prompt is read in one window, because every token sees all others.
    """

    row_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    repetition: RepetitionDetection | None = None
    reply: ReplyForm | None = None
    trims: bool = False
    depth: int | None = None
    generated: tuple[int, ...] = ()
    cache: bool = True
    salt: str | None = None
    marks: tuple[int, ...] = ()
    goes_on: bool = False
    grammar: Grammar | None = None
    grammar_field: str = ""
    prompt_logprobs: int | None = None
    targets: tuple[Target, ...] = ()
    echo: str | None = None
    vector: int = 0
    whole: bool = False

    @property
    def history(self) -> list[int]:
        """Prompt and generated tokens. The last one is not in any cache yet.

        A prompt that is read for its vector or its targets is followed by a token that nothing
        reads.
        """
        unread = [0] if self.vector or self.targets else []
        return [*self.prompt, *self.generated, *unread]

    @property
    def reports(self) -> bool:
        """Whether reading its prompt gives what it asks for, or a part of that."""
        return self.vector > 0 or self.prompt_logprobs is not None

    @property
    def length(self) -> int:
        """Tokens of prompt and generated."""
        return len(self.prompt) + len(self.generated)

    @property
    def longest(self) -> int:
        """The most tokens that the row can have, prompt included."""
        return len(self.prompt) + self.max_tokens

    @property
    def shareable(self) -> int:
        """Tokens that it may take from other rows. Reading the others gives what it is to tell."""
        if self.targets:
            return self.targets[0].place - 1
        return self.length - 1 if self.prompt_logprobs is None else 0

    def size(self, to_read: int) -> tuple[int, ...]:
        """What it asks of memory, with these tokens left to read; see `Engine.bytes_for`."""
        bare = self.grammar is None and self.sampling.bare
        return (to_read, self.longest, int(self.prompt_logprobs is not None), int(bare))


class Mark(NamedTuple):
    """A token of a row that may write a marker.

    Attributes:
        token: its index among the row's generated tokens.
        offset: where its text begins in the row's text.
    """

    token: int
    offset: int


class Said(NamedTuple):
    """The text that some tokens of a row have made final, and those of them that are marks."""

    text: str
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token of one row; log-probabilities where the row asked for them."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scored(Sampled):
    """A token of a prompt.

    Attributes:
        rank: 1 for the likeliest token.
    """

    rank: int = 1


Report = list[Scored] | bytes
"""What reading a prompt gives: the scores of its tokens, or its vector as float32."""


@dataclass(frozen=True, slots=True)
class RowStep:
    """What one step added to one row.

    Attributes:
        tokens: committed tokens: the accepted drafts and the one after them.
        drafted: drafts that were judged for the row.
        step_depth: the most drafts that the step could judge for any row.
        source: see `Emission`.
        cut: why the row ends here, if its constraint cannot be followed any further: its text
            has ``failed`` to match, or the constraint is too ``slow`` to follow.
    """

    row_id: str
    tokens: list[Sampled]
    drafted: int = 0
    step_depth: int = 0
    source: Source = "model"
    cut: Cut | None = None

    @property
    def accepted(self) -> int:
        return max(0, len(self.tokens) - 1)

    @property
    def draft_fields(self) -> dict[str, Any]:
        """The fields of an `Emission` about drafts."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "step_depth": self.step_depth,
            "source": self.source,
        }


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to one row.

    Attributes:
        tokens: committed token ids, without the stop token that ended the row.
        text: text that is final: never half a character, never part of a stop string.
        logprobs: one per token; None if the row did not ask for them.
        finish_reason: set once, with the row's last emission.
        drafted: drafts that the step judged for the row.
        accepted: how many of them it accepted: a prefix of the drafts.
        drafted_text: characters at the start of ``text`` that accepted drafts released.
        step_depth: the most drafts that the step could judge for any row.
        source: who made the drafts, or would have made them at a depth of 0.
        marks: those of the tokens; their text may come later.
        reasoning_tokens: those of all the row's tokens so far that are thinking.
        rejoins: whether the row has left, to be added again with all of its tokens.
        error: why the row failed. It has ended then.
        prompt_logprobs: of all tokens of the prompt, or of the row's targets, once, if they were
            asked for.
        vector: of the prompt, as float32, if it was asked for; the row has ended then.
    """

    row_id: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    drafted_text: int = 0
    step_depth: int = 0
    source: Source = "model"
    marks: Sequence[Mark] = ()
    reasoning_tokens: int = 0
    rejoins: bool = False
    error: InvalidRequest | None = None
    prompt_logprobs: list[PromptLogprob] | None = None
    vector: bytes | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What the engine knows of a row that it has taken in.

    Attributes:
        cached: tokens that need not be read, less than `Row.length`, from the prefix cache.
        shared: tokens that another prompt has begun with, kept or not.
        left: tokens to read before it decodes. Its first step reads the last one.
    """

    cached: int = 0
    shared: int = 0
    left: int = 0
