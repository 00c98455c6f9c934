"""The policies that measure nothing to choose: one depth throughout, or for a single row."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.policies import DepthPolicy


class FixedPolicy(DepthPolicy):
    """One depth throughout, or while there is one row ``alone``."""

    def __init__(self, depth: int, *, alone: bool = False) -> None:
        super().__init__(depth, depth)
        self._depth, self._alone = depth, alone

    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:
        self.look(rows, slots)
        if not self._alone:
            return self._depth, f"depth {self._depth} throughout"
        return (self._depth, "one row") if len(rows) == 1 else (0, "more than one row")
