"""The interface between the service and an engine. This module imports no MLX.

The service prepares rows from requests on any thread. One thread then drives the engine: ``add``,
``prefill`` until the prompt is read, then ``step`` repeatedly. A row leaves with the `Emission`
that carries its finish reason, or by ``remove``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from omlx_producer.protocol import FinishReason, GenerationRequest, ModelInfo, TokenLogprob

if TYPE_CHECKING:
    from omlx_worker.engine.constraints import Grammar


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row samples, every default resolved. See `omlx_worker.engine.ragged.sampling`.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: 1 keeps every token.
        top_k: 0 keeps every token.
        min_p: 0 keeps every token.
        repetition_penalty: 1 changes nothing.
        logit_bias: added to the logits, by token id.
        seed: 64 bits; the same seed gives the same tokens in any batch.
        ratio: judge drafts by the ratio rule instead of coupling; see
            `omlx_worker.engine.ragged.speculation`.
        top_logprobs: alternatives reported per token; None reports no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    ratio: bool = False
    top_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence to generate: a job of ``n`` choices becomes ``n`` rows.

    Attributes:
        row_id: unique among the engine's rows.
        prompt: token ids, at least one.
        max_tokens: at least 1, and fits the context together with the prompt.
        stop_strings: text that ends the row and is not part of its text.
        stop_tokens: token ids that end the row and are not part of its text.
        depth: most drafts a step; 0 for none, None for the engine's own limit.
        generated: tokens that an interrupted or paused run has produced, oldest first. They are
            read after the prompt, count towards ``max_tokens`` and penalties, and are not
            emitted again.
        grammar: what the text must match, compiled; None for free text.
    """

    row_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    depth: int | None = None
    generated: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def history(self) -> list[int]:
        """Prompt and generated tokens. The last one is not in any cache yet."""
        return [*self.prompt, *self.generated]

    @property
    def length(self) -> int:
        """Tokens to prefill."""
        return len(self.prompt) + len(self.generated)

    @property
    def longest(self) -> int:
        """The most tokens that the row can have, prompt included."""
        return len(self.prompt) + self.max_tokens


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
        window: the most drafts that the step could judge for any row.
        looked_up: whether its drafts are looked up, or would have been at a depth of 0.
        foretold: whether the first draft looked up was right, judged or not.
        found: whether the drafts of the step after it are looked up.
    """

    row_id: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0
    window: int = 0
    looked_up: bool = False
    foretold: bool = False
    found: bool = False


class Rows(Protocol):
    """The part of the interface that an engine shares with its decoder.

    Only `bytes_for` may be called from any thread.
    """

    @property
    def slots(self) -> int:
        """Rows that a step computes, empty ones included; 0 while there are none."""
        ...

    @property
    def changes(self) -> int:
        """How often steps were traced or rows moved so far; either makes the next steps slow."""
        ...

    def add(self, row: Row) -> None:
        """Take a row in; its prompt is not yet read.

        An interrupted row continues after its ``generated`` tokens. Text that they left
        incomplete is emitted with the tokens that complete it. If they already end the row, the
        next `step` emits its finish reason and no token.
        """
        ...

    def prefill(self, row_id: str, tokens: int) -> int:
        """Read up to ``tokens`` more of a row's prompt and of what it has generated.

        Returns:
            How many of the row's `Row.length` tokens are left to read; at 0 the row decodes
            from the next step.
        """
        ...

    def suspend(self, row_id: str) -> bool:
        """Take a decoding row out of the batch and keep everything needed to resume it.

        The next `step` still emits what the step in flight yields for the row, even if no row is
        left to decode. That may finish the row.

        Returns:
            False if the row is not decoding or the decoder cannot suspend rows. The row can
            instead be removed and added again with its ``generated`` tokens.
        """
        ...

    def resume(self, row_id: str) -> None:
        """Put a suspended row back. It decodes from the next step as if it had never left.

        Raises:
            KeyError: if no such row is suspended.
        """
        ...

    def suspended_bytes(self, row_id: str) -> int:
        """The memory that a suspended row holds; 0 for any other."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights."""
        ...

    def bytes_for(self, rows: Sequence[tuple[int, int]], *, alone: bool = False) -> int:
        """The most bytes that rows take while they decode together, without the weights.

        Included are bodies rounded up to their buckets, empty slots, and the copies that exist
        while a batch grows, for every order in which rows grow and leave. Suspended rows are not
        included, nor are intermediate results of a prefill chunk: `memory_budget` leaves room
        for those.

        Args:
            rows: for each row the tokens left to read (`Row.length`, or 0 once it decodes) and
                the most it can have (`Row.longest`).
            alone: count a new batch. By default rows are in the present batch, whose slots and
                bodies stay for a while after rows have left.
        """
        ...

    def remove(self, row_id: str) -> None:
        """Drop a row at any point, suspended or not; unknown ids are ignored.

        Nothing more is emitted for it.
        """
        ...


class Engine(Rows, Protocol):
    """A model that decodes many rows at once.

    Only `prepare`, `text_of` and `bytes_for` may be called from any thread.
    """

    @property
    def info(self) -> ModelInfo:
        """The model's name and limits."""
        ...

    @property
    def identity(self) -> str:
        """Names the model, the device and the software, which step times depend on."""
        ...

    @property
    def max_rows(self) -> int:
        """How many rows may be added at the same time."""
        ...

    @property
    def max_depth(self) -> int:
        """How many tokens a step can draft for a row; 0 if nothing drafts."""
        ...

    @property
    def own_depth(self) -> int:
        """How many of them the model or its draft model makes; the others are looked up."""
        ...

    def prepare(self, request: GenerationRequest, job_id: str) -> list[Row]:
        """Turn a request into ``request.n`` rows, named ``<job id>:<choice>``.

        Raises:
            InvalidRequest: when this model can never serve it.
        """
        ...

    def text_of(self, row: Row) -> str:
        """The text that a row's ``generated`` tokens have made final. From any thread."""
        ...

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        """Run one decode step for all rows whose prompts are read.

        Args:
            depths: how many tokens to draft for each row, for a later step to judge; rows not
                named get their limit.

        Emissions may lag one step behind. Rows whose finish reason is set have left.
        """
        ...

    @property
    def memory_budget(self) -> int:
        """Bytes that weights and rows may take together on this device."""
        ...

    def keep_within(self, limit: int) -> None:
        """Limit the memory of weights, rows and buffers kept for reuse to ``limit`` bytes.

        Called once, before any row is added. No allocation fails because of it.
        """
        ...

    def close(self) -> None:
        """Wait for the device and drop the model. The last call, from the same thread."""
        ...
