"""What a depth policy sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.engine.rows.emission import Emission

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class DepthPolicy(Protocol):
    """Asked before every step; told about every step once its outcome is read."""

    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:
        """How deep rows draft in the next step, each up to its limit, and why.

        Args:
            slots: of the batch in the step whose outcome is observed next.
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
