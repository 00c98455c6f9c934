"""Asks the depth policy before each decode step, and reports outcomes to it.

A step is dispatched before the outcome of the one before it is read, so whatever is decided now
shows in the outcome after next.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.decode.batch_size import BatchSize
from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth.policies import DepthPolicy, Mode
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.row import Row


def make_policy(mode: Mode, max_depth: int, own_depth: int) -> DepthPolicy:
    """The policy of a mode; see `AutoPolicy`. Nothing drafts where ``max_depth`` is 0."""
    if mode == "batched" or max_depth == 0:
        return FixedPolicy(0)
    if mode == "auto":
        return AutoPolicy(max_depth, own_depth)
    return FixedPolicy(max_depth, alone=mode == "hybrid")


class DepthDriver:
    """What the decode loop calls before and after each step.

    Args:
        others: see `BatchSize`.

    Attributes:
        depth: drafts that any row gets in the step that was dispatched last.
        reason: why that deep, in words.
        batch_size: how many rows run.
    """

    def __init__(self, policy: DepthPolicy, others: int | None = None) -> None:
        self.depth, self.reason = 0, ""
        self.batch_size = BatchSize(others)
        self._policy = policy
        self._dispatched = 0

    def before(self, rows: Sequence[Row], slots: int) -> int:
        """How many tokens rows draft in the next step, at most; see `DepthPolicy.choose`."""
        views = [_view(row) for row in rows]
        depth, self.reason = self._policy.choose(views, slots)
        limit = max((view.limit for view in views), default=0)
        self._dispatched, self.depth = self.depth, min(limit, depth)
        return depth

    def after(self, emissions: Sequence[Emission], seconds: float | None) -> None:
        """A step was dispatched, and these emissions of the one before it were read. It has no
        ``seconds`` if anything but a step took time."""
        if not emissions:
            return
        depth = max(emission.step_depth for emission in emissions)
        # A step drafts for the next: either change takes time that neither depth takes.
        same = depth == self._dispatched == self.depth
        self._policy.observe(emissions, depth, seconds if same else None)


def _view(row: Row) -> RowView:
    request = row.request
    limit = MAX_DRAFT_DEPTH if request.depth is None else request.depth
    return RowView(row.row_id, limit, row.length, request.grammar is not None)
