"""The policies that measure nothing to choose: one depth throughout, or for a single row."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.policies import BatchSpeed, RowView
from omlx_worker.decode.depth.speeds import Speeds
from omlx_worker.engine.rows.row import Emission


class FixedPolicy:
    """One depth throughout, or while there is one row ``alone``."""

    def __init__(self, depth: int, *, alone: bool = False) -> None:
        self._depth, self._alone = depth, alone
        self._speeds = Speeds(depth, depth)

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> tuple[int, str]:  # noqa: ARG002
        self._speeds.look(rows, slots)
        if not self._alone:
            return self._depth, f"depth {self._depth} throughout"
        return (self._depth, "one row") if len(rows) == 1 else (0, "more than one row")

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        self._speeds.observe(emissions, depth, seconds)

    def compare(self, sizes: Sequence[int]) -> list[BatchSpeed]:
        return self._speeds.compare(sizes, [0 if self._alone else self._depth])
