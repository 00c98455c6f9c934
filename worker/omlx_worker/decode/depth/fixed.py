"""The policies that measure nothing: one depth throughout, or for a single row."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.engine.rows.emission import Emission


class FixedPolicy:
    """One depth throughout, or while there is one row ``alone``."""

    def __init__(self, depth: int, *, alone: bool = False) -> None:
        self._depth, self._alone = depth, alone

    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:  # noqa: ARG002
        if not self._alone:
            return self._depth, f"depth {self._depth} throughout"
        return (self._depth, "one row") if len(rows) == 1 else (0, "more than one row")

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        """There is nothing to learn."""
