"""Asks the depth policy before each decode step, and reports outcomes to it.

A step is dispatched before the outcome of the one before it is read, so whatever is decided now
shows in the outcome after next.
"""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.policies import DepthPolicy, FixedPolicy, Mode, make_policy
from omlx_worker.decode.depth.records import Decision, RowView, StepReport
from omlx_worker.decode.row import DecodeRow
from omlx_worker.engine.row import Emission


class DepthDriver:
    """What the decode loop calls before and after each step.

    Args:
        depth: drafts a row and step, at most.

    Attributes:
        changes_depth: whether the depth changed in the step that was reported last or the next.
    """

    def __init__(self, policy: DepthPolicy, depth: int) -> None:
        self.changes_depth = False
        self._policy = policy
        self._depth = depth
        self._decision = self._dispatched = Decision(0, {}, "")
        self._slots = self._context = 0

    @classmethod
    def fixed(cls, depth: int) -> DepthDriver:
        """One whose rows always draft as deep as they may."""
        return cls(FixedPolicy(depth), depth)

    @classmethod
    def of_mode(cls, mode: Mode, max_depth: int, own_depth: int) -> DepthDriver:
        """The driver of a mode; see `make_policy`."""
        return cls(make_policy(mode, max_depth, own_depth), max_depth)

    @property
    def depth(self) -> int:
        """Drafts a row and step, at most, in use now."""
        return self._decision.depth

    @property
    def reason(self) -> str:
        """Why that deep."""
        return self._decision.reason

    def before(self, rows: Sequence[DecodeRow], slots: int, coming: int = 0) -> dict[str, int]:
        """How many tokens to draft for each of these rows in the step that comes now.

        Args:
            slots: of the batch as the step before it left it, the one whose outcome is read next.
            coming: see `Scheduler.coming`.
        """
        views = [self._view(row) for row in rows]
        self._slots, self._context = slots, max((view.context for view in views), default=0)
        decision = self._policy.choose(views, slots, coming)
        self._dispatched, self._decision = self._decision, decision
        return {row.row_id: decision.depths.get(row.row_id, 0) for row in rows}

    def after(self, emissions: Sequence[Emission], seconds: float | None) -> None:
        """A step was dispatched, and these emissions of the one before it were read.

        Args:
            seconds: since the step before; None if anything but a step took time.
        """
        if not emissions:
            return
        depth = max(max(emission.drafted, emission.window) for emission in emissions)
        # A step drafts for the next: either change takes time that neither depth takes.
        self.changes_depth = not depth == self._dispatched.depth == self._decision.depth
        seconds = None if self.changes_depth else seconds
        self._policy.observe(StepReport(seconds, self._slots, depth, self._context, emissions))

    def _view(self, row: DecodeRow) -> RowView:
        asked, constrained = row.request.depth, row.request.grammar is not None
        limit = self._depth if asked is None else min(self._depth, asked)
        return RowView(row.row_id, limit, row.length, constrained)
