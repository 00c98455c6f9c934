"""The interface between the service and an engine. This module imports no MLX.

The service prepares rows from requests on any threads. One thread then drives the engine: ``add``,
``read`` until the prompt is read, then ``step`` repeatedly. One ``read`` may read several prompts.
A row leaves with an `Emission` that has a finish reason or says that it rejoins, or by ``remove``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from omlx_producer.wire import GenerationRequest, ModelInfo
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row, Size

PREPARED_AT_ONCE = 2
"""Requests that are prepared at the same time."""

LONGEST_CHUNK = 2048
"""Tokens of a row that one `Engine.read` reads, at most."""

FIRST_ROWS = 32
"""Rows of a batch at first: a whole tile of a product on most devices. Fewer never
made more tokens on those that others have measured, with drafts or without."""

FIXED_CHUNK = 256
"""With fixed shapes, prompts are read in chunks that end at multiples of this."""


def depths_of(most: int, own: int) -> list[int]:
    """How many tokens steps draft: up to the model's ``own``, half of ``most`` and ``most``."""
    return sorted({*range(own + 1), most // 2, most})


class Delays(NamedTuple):
    """What makes steps and windows slow, how often so far.

    Attributes:
        traces: a step or a window was traced for a new shape.
        drains: rows were moved, with the pipeline drained.
        contests: forms of a kernel were compared.
    """

    traces: int = 0
    drains: int = 0
    contests: int = 0


HEAD, LOOKUP, NO_DRAFTER = "head", "lookup", "none"
"""What ``--drafter`` names beside models."""

Tell = Callable[[str], object]
"""Told in a few words what a long work does now. From any thread."""


class ModelError(Exception):
    """A model that cannot be loaded. The message is one sentence for the user."""


class Engine(Protocol):
    """A model that decodes many rows at once.

    Only `prepare`, `text_of` and `bytes_for` may be called from any thread.

    Attributes:
        info: the model's name and limits.
        max_rows: how many rows may be added at the same time.
        max_depth: how many tokens a step can draft for a row; 0 if nothing drafts.
        own_depth: how many of them the model or its draft model makes; the others are looked up.
        drafters: those of ``--drafter`` that draft, by their names there, a comma between two;
            None for none.
        shares: whether there is a prefix cache, which keeps beginnings of prompts for other rows.
        pads: whether as many tokens of each row are computed as of the longest, padded.
        weight_bytes: of the model's weights.
        memory_budget: bytes that weights and rows may take together on this device.
    """

    info: ModelInfo
    max_rows: int
    max_depth: int
    own_depth: int
    drafters: str | None
    shares: bool
    pads: bool
    weight_bytes: int
    memory_budget: int

    @property
    def slots(self) -> int:
        """Rows that a step computes, empty ones included; 0 while there are none."""
        ...

    @property
    def delays(self) -> Delays:
        """What has made steps and windows slow so far."""
        ...

    @property
    def first_parts(self) -> int:
        """Calls of `warm_up` that do what the first job needs, at most."""
        ...

    def warm_up(self, *, first: bool = False) -> bool:
        """Do a part of what rows would wait for if they met it first: some 100 ms.

        Called while there is no row; `add` ends it.

        Args:
            first: only what the first job needs.

        Returns:
            Whether more of it is left.
        """
        ...

    def prepare(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        """Turn a request into rows, named ``<job id>:<number>``. From any thread.

        A request has a row for each of its ``n`` choices, or for each text of its ``input``.

        Raises:
            InvalidRequest: when this model can never serve it.
            TimeoutError: when the machine is too busy to prepare it. The message is a sentence.
        """
        ...

    def text_of(self, row: Row) -> Said:
        """The text that a row's tokens have made final. From any thread, before it is added."""
        ...

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:
        """The most bytes that rows take while they decode together, without the weights.

        It is a sum: pages, rounded up to the pool's bucket, slots, empty ones included, prompts
        that are being read, and the most that a step, a chunk or a larger pool takes in passing.
        Suspended rows are not included, nor are a chunk's activations: `memory_budget` leaves
        room for those.

        Args:
            rows: their sizes.
            alone: count a new batch. By default rows are in the present batch, whose slots and
                bodies stay for a while after rows have left.
        """
        ...

    def keep_within(self, limit: int) -> None:
        """Limit the memory of weights, rows and buffers kept for reuse to ``limit`` bytes.

        Called once, before any row is added. No allocation fails because of it. A batch begins with
        pages for an eighth of what the weights leave, at most.
        """
        ...

    def miscounted_pages(self) -> int:
        """How many pages of the caches others have than are counted; 0 unless there is a fault."""
        ...

    def add(self, row: Row) -> int:
        """Take a row in; nothing of it is read yet but what the prefix cache holds.

        An interrupted row continues after its tokens. Text that they left incomplete is emitted
        with the tokens that complete it. If they already end the row, the next `step` emits its
        finish reason and no token; of a row whose prompt is scored, the `read` that ends it.

        Returns:
            Tokens with which another prompt has begun too, kept or not.
        """
        ...

    def read(self, tokens: Mapping[Row, int]) -> list[Emission]:
        """Read more of some rows' tokens, together.

        Args:
            tokens: the most to read of each row, at most `LONGEST_CHUNK`; 0 for a row with none
                left. What is read up to one of `Row.stops`, the prefix cache keeps.

        Returns:
            The log-probabilities or vectors of the prompts that are read now. A row that asks for
            no tokens, or has had them all, ends with them. A row with nothing left decodes from
            the next step.
        """
        ...

    def look(self, row: Row) -> None:
        """Look at the next picture of a row that is read, so that `read` has its vectors.

        Raises:
            Exception: if it cannot be decoded, which `prepare` has tried.
        """
        ...

    def limit_prefixes(self, room: int) -> None:
        """Let the prefix cache take no more than ``room`` bytes until the next call."""
        ...

    def step(self, depth: int | None = None) -> list[Emission]:
        """Run one decode step for all rows whose prompts are read.

        Args:
            depth: how many tokens to draft for each row that does not ask for fewer, for a later
                step to judge. None keeps that of the last step.

        Emissions may lag one step behind.
        """
        ...

    def suspend(self, row: Row) -> None:
        """Take a decoding row out of the batch and keep everything needed to resume it.

        The next `step` still emits what the step in flight yields for the row, even if no row is
        left to decode. That may end the row. `Row.kept_bytes` says what it holds meanwhile.
        """
        ...

    def resume(self, row: Row) -> None:
        """Put a suspended row back. It decodes from the next step as if it had never left."""
        ...

    def remove(self, row: Row) -> None:
        """Drop a row at any point, suspended or not; one that is not in the engine is ignored.

        Nothing more is emitted for it.
        """
        ...

    def close(self) -> None:
        """Wait for the device and drop the model. The last call, from the same thread."""
        ...
