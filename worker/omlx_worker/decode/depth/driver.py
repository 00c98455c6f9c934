"""Between two decode steps: how deep to draft, and what the step that has landed tells.

A step is dispatched before the outcome of the one before it is read, so whatever is decided now
shows in the outcome after next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from omlx_worker.decode.depth.fixed import Decision, DepthPolicy, Outcome, RowView, StepReport
from omlx_worker.decode.depth.knowledge import Knowledge
from omlx_worker.engine.interface import Emission, Row
from omlx_worker.sentences import in_rows

log = logging.getLogger("omlx_worker.decode.depth.driver")


class Pacing:
    """Asks a policy before each step, and reports to it after.

    Args:
        knowledge: where the policy keeps what it has measured, if it measures.

    Attributes:
        transitions: how often drafting began or ended while rows were being decoded.
        changes_depth: whether the depth changed around the step that was heard of last.
    """

    def __init__(self, policy: DepthPolicy, depth: int, knowledge: Knowledge | None = None) -> None:
        self.transitions = 0
        self.changes_depth = False
        self._policy = policy
        self._knowledge = knowledge
        self._depth = depth
        self._contexts: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._decision: Decision | None = None
        self._dispatched: Decision | None = None
        self._drafting: bool | None = None
        self._slots = 0
        self._context = 0

    @property
    def depth(self) -> int:
        """Drafts a row and step, at most, in use now."""
        return self._decision.depth if self._decision else 0

    @property
    def reason(self) -> str:
        """Why that deep."""
        return self._decision.reason if self._decision else ""

    def rest(self, *, for_good: bool = False) -> None:
        """There is nothing to do now, or never again: time to keep what was measured."""
        if self._knowledge:
            self._knowledge.save(at_once=for_good)

    def add(self, row: Row) -> None:
        """A row is about to join."""
        self._contexts[row.row_id] = row.length
        self._limits[row.row_id] = self._depth if row.depth is None else min(self._depth, row.depth)

    def remove(self, row_id: str) -> None:
        """A row has left."""
        self._contexts.pop(row_id, None)
        self._limits.pop(row_id, None)
        if not self._contexts:
            self._drafting = None

    def before(
        self, rows: Sequence[str], slots: int, coming: int = 0, *, reading: bool = False
    ) -> dict[str, int]:
        """How many tokens to draft for each of these rows in the step that comes now.

        Args:
            slots: of the batch as the step before it left it, the one whose outcome is read next.
            coming: rows that join right after this step, one by one.
            reading: whether prompts are read between the steps.
        """
        self._slots = slots
        views = [RowView(row, self._limits[row], self._contexts[row]) for row in rows]
        self._context = max((view.context for view in views), default=0)
        decision = self._policy.choose(views, slots, coming, reading=reading)
        self._dispatched, self._decision = self._decision, decision
        self._announce(self._decision, len(rows))
        return {row: self._decision.depths.get(row, 0) for row in rows}

    def after(self, emissions: Sequence[Emission], seconds: float | None) -> None:
        """A step was dispatched, and these emissions of the one before it were read.

        Args:
            seconds: since the step before; None if they were not those of a step alone.
        """
        for emission in emissions:
            if emission.row_id in self._contexts:
                self._contexts[emission.row_id] += len(emission.tokens)
        if not emissions:
            return
        report = StepReport(
            seconds=seconds,
            rows=self._slots,
            depth=max(emission.drafted for emission in emissions),
            context=self._context,
            outcomes=[Outcome(e.row_id, e.drafted, e.accepted) for e in emissions],
            drafted=self._dispatched.depth if self._dispatched else None,
            turns=self._turns,
        )
        self.changes_depth = report.changes_depth
        self._policy.observe(report)

    @property
    def _turns(self) -> bool:
        """Whether the step dispatched last drafts otherwise than the one heard of now."""
        if self._decision is None or self._dispatched is None:
            return False
        return self._decision.depth != self._dispatched.depth

    def _announce(self, decision: Decision, rows: int) -> None:
        if decision.passing:
            return
        drafting = decision.depth > 0
        if self._drafting is not None and drafting != self._drafting:
            self.transitions += 1
            turn = "begins" if drafting else "ends"
            log.info("drafting %s with %s: %s", turn, in_rows(rows), decision.reason)
        self._drafting = drafting
