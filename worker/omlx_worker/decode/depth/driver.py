"""Asks the depth policy before each decode step, and reports outcomes to it.

A step is dispatched before the outcome of the one before it is read, so whatever is decided now
shows in the outcome after next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from omlx_producer.terminal import counted
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.decode.depth.calibration import Calibration
from omlx_worker.decode.depth.policies import DepthPolicy, FixedPolicy, make_policy
from omlx_worker.decode.depth.records import Decision, RowView, StepReport
from omlx_worker.decode.row import DecodeRow
from omlx_worker.engine.interface import Engine
from omlx_worker.engine.row import Emission
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.decode.depth.driver")


class DepthDriver:
    """What the decode loop calls before and after each step.

    Args:
        depth: drafts a row and step, at most.
        calibration: runs while there is nothing else to do; None if the policy learns nothing.

    Attributes:
        changes_depth: whether the depth changed in the step that was reported last or the next.
    """

    def __init__(
        self, policy: DepthPolicy, depth: int, calibration: Calibration | None = None
    ) -> None:
        self.changes_depth = False
        self._policy = policy
        self._calibration = calibration
        self._depth = depth
        self._decision: Decision | None = None
        self._dispatched: Decision | None = None
        self._drafting: bool | None = None
        self._slots = 0
        self._context = 0

    @classmethod
    def fixed(cls, depth: int) -> DepthDriver:
        """One whose rows always draft as deep as they may."""
        return cls(FixedPolicy(depth), depth)

    @classmethod
    def of_mode(cls, settings: WorkerSettings, engine: Engine, budget: MemoryBudget) -> DepthDriver:
        """The driver of the mode in the settings, for an engine."""
        policy = make_policy(settings.mode, engine.max_depth, engine.own_depth)
        calibration = None
        if isinstance(policy, AutoPolicy):
            calibration = Calibration(
                policy, engine, budget, settings.state_dir, measures=settings.calibration
            )
        return cls(policy, engine.max_depth, calibration)

    @property
    def depth(self) -> int:
        """Drafts a row and step, at most, in use now."""
        return self._decision.depth if self._decision else 0

    @property
    def reason(self) -> str:
        """Why that deep."""
        return self._decision.reason if self._decision else ""

    def idle(self) -> bool:
        """There is no job: run one calibration step. Returns whether more of them are due."""
        self._drafting = None
        return self._calibration is not None and self._calibration.step()

    def save(self) -> None:
        """Keep what was measured for the next start."""
        if self._calibration:
            self._calibration.save(at_once=True)

    def give_way(self) -> None:
        """A row is about to join: remove calibration's rows from the engine."""
        if self._calibration:
            self._calibration.give_way()

    def before(self, rows: Sequence[DecodeRow], slots: int, coming: int = 0) -> dict[str, int]:
        """How many tokens to draft for each of these rows in the step that comes now.

        Args:
            slots: of the batch as the step before it left it, the one whose outcome is read next.
            coming: see `Scheduler.coming`.
        """
        self._slots = slots
        views = [self._view(row) for row in rows]
        self._context = max((view.context for view in views), default=0)
        decision = self._policy.choose(views, slots, coming)
        self._dispatched, self._decision = self._decision, decision
        self._announce(self._decision, len(rows))
        return {row.row_id: decision.depths.get(row.row_id, 0) for row in rows}

    def after(self, emissions: Sequence[Emission], seconds: float | None) -> None:
        """A step was dispatched, and these emissions of the one before it were read.

        Args:
            seconds: since the step before; None if anything but a step took time.
        """
        if not emissions:
            return
        depth = max(max(emission.drafted, emission.window) for emission in emissions)
        now, before = self._decision, self._dispatched
        # A step drafts for the next: either change takes time that neither depth takes.
        self.changes_depth = before is not None and (
            before.depth != depth or (now is not None and now.depth != before.depth)
        )
        report = StepReport(
            seconds=None if self.changes_depth else seconds,
            slots=self._slots,
            depth=depth,
            context=self._context,
            emissions=emissions,
        )
        self._policy.observe(report)

    def _view(self, row: DecodeRow) -> RowView:
        asked, constrained = row.request.depth, row.request.grammar is not None
        limit = self._depth if asked is None else min(self._depth, asked)
        return RowView(row.row_id, limit, row.length, constrained)

    def _announce(self, decision: Decision, rows: int) -> None:
        if decision.passing:
            return
        drafting = decision.depth > 0
        if self._drafting is not None and drafting != self._drafting:
            turn = "begins" if drafting else "ends"
            log.debug("drafting %s with %s: %s", turn, counted(rows, "row"), decision.reason)
        self._drafting = drafting
