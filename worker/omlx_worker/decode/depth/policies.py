"""What a depth policy sees and answers. No MLX and no Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from omlx_worker.engine.rows.row import Emission

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class RowView(NamedTuple):
    """What a policy sees of a row that decodes.

    Attributes:
        limit: the most drafts a step that this row may have; 0 where it must not draft.
        context: tokens in its cache.
        constrained: whether a grammar may force drafts on it.
    """

    row_id: str
    limit: int
    context: int = 0
    constrained: bool = False


class BatchSpeed(NamedTuple):
    """How fast a batch is.

    Attributes:
        depth: drafts a row and step, at most.
        tokens: a second, of all rows together.
    """

    rows: int
    depth: int
    tokens: float


class DepthPolicy(Protocol):
    """Asked before every step; told about every step once its outcome is read."""

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> tuple[int, str]:
        """How deep rows draft in the next step, each up to its limit, and why.

        Args:
            slots: of the batch in the step whose outcome is observed next.
            coming: rows that join after that step; see `Scheduler.coming`.
        """
        ...

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        """Learn from a step whose outcome has been read.

        Args:
            emissions: one a row.
            depth: drafts in the window that it verified.
            seconds: since the step before; None if anything but a step at this depth took time.
        """
        ...

    def compare(self, sizes: Sequence[int]) -> list[BatchSpeed]:
        """How fast batches of these sizes are; see `Speeds.compare`."""
        ...
