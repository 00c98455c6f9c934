"""What the service and an engine say to each other. This module imports no MLX.

The service prepares rows from requests on any thread, then drives one engine from one thread:
``add``, ``prefill`` until nothing is left of the prompt, then ``step`` again and again. A row
leaves by itself with the `Emission` that carries its finish reason, or by ``remove``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from omlx_producer.protocol import FinishReason, GenerationRequest, ModelInfo, TokenLogprob


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
        depth: drafts a step, at most; 0 for none, None for what the engine does anyway.
        generated: what an interrupted or paused run has produced already, oldest first. It is
            read after the prompt, counts towards ``max_tokens`` and penalties, and is not
            emitted again.
    """

    row_id: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    depth: int | None = None
    generated: tuple[int, ...] = ()

    @property
    def history(self) -> list[int]:
        """Every token there is, the last of them not yet in any cache."""
        return [*self.prompt, *self.generated]

    @property
    def length(self) -> int:
        """Tokens to prefill."""
        return len(self.prompt) + len(self.generated)

    @property
    def longest(self) -> int:
        """Tokens that the row may come to."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step added to one row.

    Attributes:
        tokens: committed token ids, without the stop token that ended the row.
        text: text that is final: never half a character, never part of a stop string.
        logprobs: one a token, where asked for.
        finish_reason: set once, with the row's last emission.
        drafted: drafts that the step judged for the row.
        accepted: how many of them it accepted, always the first ones.
    """

    row_id: str
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    drafted: int = 0
    accepted: int = 0


class Rows(Protocol):
    """What an engine and the decoder below it share: rows come in, pause, resume and leave.

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

        A row that was interrupted goes on where it stood: what is emitted is what follows its
        ``generated`` tokens, text included that they left half finished. Where those end the
        row already, the next `step` emits its finish reason and no token.
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
        """Take a decoding row out of the batch and keep all that it needs to go on.

        What the step in flight still yields for it is emitted by the next `step`, even when no
        row is left to decode, and may finish it.

        Returns:
            False where that cannot be done: the row is not decoding, or the model runs on a
            decoder that cannot. It can then be removed, and added again with what it has
            ``generated``.
        """
        ...

    def resume(self, row_id: str) -> None:
        """Put a suspended row back: it decodes from the next step, as if it had never left.

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
        """Bytes that rows will take at most, while they decode together, besides the weights.

        Bodies rounded up to their buckets, empty slots, and the copies that are alive while a
        batch grows are included, in whatever order rows grow and leave; what a chunk of prefill
        computes in passing is not, for which `memory_budget` leaves room, nor are suspended rows.

        Args:
            rows: of each, how many tokens are yet to be read (`Row.length`, or 0 once it
                decodes), and how many it may come to (`Row.longest`).
            alone: in a batch of their own. By default they are in the one there is, whose slots
                and bodies stay for a while when rows have left.
        """
        ...

    def remove(self, row_id: str) -> None:
        """Drop a row at any point, suspended or not; unknown ids are ignored.

        Nothing more is emitted for it.
        """
        ...


class Engine(Rows, Protocol):
    """A model that decodes many rows at once. `prepare` and `text_of` may be called from any
    thread as well."""

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
        """How many tokens a step can draft for a row; 0 for a model without a head."""
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
            depths: how many tokens to draft for rows now, for a later step to judge; rows not
                named get as many as they may have.

        Emissions may lag one step behind. Rows whose finish reason is set have left.
        """
        ...

    @property
    def memory_budget(self) -> int:
        """Bytes that weights and rows may take together on this device."""
        ...

    def keep_within(self, limit: int) -> None:
        """Respect a budget, in bytes for everything, also in what is kept for reuse.

        Called once and before any row is added. It makes nothing fail.
        """
        ...

    def close(self) -> None:
        """Wait for the device and let go of the model. The last call, from the same thread."""
        ...
