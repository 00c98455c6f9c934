"""The modes of drafting as policies. Pure Python: a policy knows no MLX and no Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.decode.depth.records import Decision, RowView, StepReport

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class DepthPolicy(Protocol):
    """Asked before every step; told about every step once its outcome is read."""

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> Decision:
        """How deep to draft in the next step, for these rows, before ``coming`` more join."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        ...


class FixedPolicy:
    """Every row drafts as deep as it may, up to one depth: `mtp`, and `batched` at depth 0.

    Args:
        alone: drafts only while there is one row: `hybrid`.
    """

    def __init__(self, depth: int, *, alone: bool = False) -> None:
        self._depth, self._alone = depth, alone

    def choose(self, rows: Sequence[RowView], slots: int, coming: int = 0) -> Decision:  # noqa: ARG002
        depth, reason = self._depth, f"depth {self._depth} throughout"
        if self._alone:
            depth = depth if len(rows) == 1 else 0
            reason = "one row" if len(rows) == 1 else "more than one row"
        depths = {row.row_id: k for row in rows if (k := min(row.limit, depth)) > 0}
        return Decision(max(depths.values(), default=0), depths, reason)

    def observe(self, report: StepReport) -> None:
        pass


def make_policy(mode: Mode, max_depth: int, own_depth: int | None = None) -> DepthPolicy:
    """The policy of a mode.

    Args:
        max_depth: drafts a row and step, at most; 0 if nothing drafts.
        own_depth: of those that the model makes itself; the others are looked up. None for all.
    """
    if mode == "batched" or max_depth == 0:
        return FixedPolicy(0)
    if mode == "auto":
        return AutoPolicy(max_depth, own_depth)
    return FixedPolicy(max_depth, alone=mode == "hybrid")
