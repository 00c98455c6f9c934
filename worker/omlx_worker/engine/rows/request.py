"""What a row asks for, as an engine takes it. This module imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from omlx_producer.wire import RepetitionDetection
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.thinking import Thinking

if TYPE_CHECKING:
    from omlx_worker.engine.rows.constraints import Grammar


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
class RowRequest:
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
        pictures: those of its prompt, in their order.
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
    cache: bool = True
    salt: str | None = None
    marks: tuple[int, ...] = ()
    goes_on: bool = False
    grammar: Grammar | None = None
    grammar_field: str = ""
    prompt_logprobs: int | None = None
    targets: tuple[Target, ...] = ()
    echo: str | None = None
    pictures: tuple[Picture, ...] = ()
    vector: int = 0
    whole: bool = False

    @property
    def unread(self) -> bool:
        """Whether nothing follows its prompt, all of which is read: for its vector or targets."""
        return self.vector > 0 or bool(self.targets)

    @property
    def longest(self) -> int:
        """The most tokens that the row can have, prompt included."""
        return len(self.prompt) + self.max_tokens

    def size(self, to_read: int) -> tuple[int, ...]:
        """What it asks of memory, with these tokens left to read; see `Size`."""
        bare = self.grammar is None and self.sampling.bare
        seen = sum(picture.count for picture in self.pictures) if to_read else 0
        return (to_read, self.longest, int(self.prompt_logprobs is not None), int(bare), seen)
