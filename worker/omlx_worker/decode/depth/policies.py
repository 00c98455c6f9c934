"""Policies of how deep rows draft: what all of them have in common, and those that learn nothing.

Pure Python: a policy sees rows by name and learns from reports; it knows no MLX and no Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.decode.depth.records import Decision, RowView, StepReport

Mode = Literal["auto", "hybrid", "mtp", "batched"]


class DepthPolicy(Protocol):
    """Asked before every step; told about every step once its outcome is read."""

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int,
        coming: int = 0,
    ) -> Decision:
        """How deep to draft in the next step, for these rows, before ``coming`` more join."""
        ...

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        ...


class FixedPolicy:
    """Every row drafts as deep as it may, up to one depth: `mtp`, and `batched` at depth 0."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._reason = f"depth {depth} throughout"

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int,  # noqa: ARG002
        coming: int = 0,  # noqa: ARG002
    ) -> Decision:
        return decide(rows, self._depth, self._reason)

    def observe(self, report: StepReport) -> None:
        pass


class HybridPolicy:
    """One row drafts; as soon as there are two, none does, until one is left."""

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._alone: bool | None = None
        self._reason = ""

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int,  # noqa: ARG002
        coming: int = 0,  # noqa: ARG002
    ) -> Decision:
        if rows and (len(rows) == 1) != self._alone:
            came_back = self._alone is False
            self._alone = len(rows) == 1
            if not self._alone:
                self._reason = "more than one row"
            elif came_back:
                self._reason = "the batch has drained to one row"
            else:
                self._reason = "one row"
        return decide(rows, self._max_depth if len(rows) == 1 else 0, self._reason)

    def observe(self, report: StepReport) -> None:
        pass


def make_policy(mode: Mode, max_depth: int, own_depth: int | None = None) -> DepthPolicy:
    """The policy of a mode.

    Args:
        max_depth: drafts a row and step, at most; 0 if nothing drafts.
        own_depth: of those that the model makes itself; the others are looked up. None for all.
    """
    if mode == "mtp":
        return FixedPolicy(max_depth)
    if mode == "batched" or max_depth == 0:
        return FixedPolicy(0)
    return HybridPolicy(max_depth) if mode == "hybrid" else AutoPolicy(max_depth, own_depth)


def decide(rows: Sequence[RowView], depth: int, reason: str) -> Decision:
    """Let every row draft up to ``depth``, its own limit respected."""
    depths = {row.row_id: k for row in rows if (k := min(row.limit, depth)) > 0}
    return Decision(max(depths.values(), default=0), depths, reason)
