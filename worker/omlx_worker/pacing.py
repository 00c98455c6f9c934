"""Between two decode steps: how deep to draft, and what the step that has landed tells.

A step is dispatched before the outcome of the one before it is read, so whatever is decided now
shows in the outcome after next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from omlx_worker.depth import Decision, DepthPolicy, Outcome, RowView, StepReport
from omlx_worker.engine.interface import Emission, Row

log = logging.getLogger("omlx_worker.pacing")


class Pacing:
    """Asks a policy before each step, and reports to it after.

    Attributes:
        transitions: how often drafting began or ended while rows were being decoded.
    """

    def __init__(self, policy: DepthPolicy, depth: int) -> None:
        self.transitions = 0
        self._policy = policy
        self._depth = depth
        self._contexts: dict[str, int] = {}
        self._limits: dict[str, int] = {}
        self._decision: Decision | None = None
        self._dispatched: Decision | None = None
        self._drafting: bool | None = None
        self._stepped_at: float | None = None

    def add(self, row: Row) -> None:
        """A row is about to join."""
        self._contexts[row.row_id] = len(row.prompt)
        self._limits[row.row_id] = self._depth if row.depth is None else min(self._depth, row.depth)

    def remove(self, row_id: str) -> None:
        """A row has left."""
        self._contexts.pop(row_id, None)
        self._limits.pop(row_id, None)
        if not self._contexts:
            self._drafting = None

    def disturb(self) -> None:
        """Something other than a step ran: the time until the next outcome says nothing."""
        self._stepped_at = None

    def before(self, rows: Sequence[str]) -> dict[str, int]:
        """How many tokens to draft for each of these rows in the step that comes now."""
        views = [RowView(row, self._limits[row], self._contexts[row]) for row in rows]
        self._dispatched, self._decision = self._decision, self._policy.choose(views)
        self._announce(self._decision, len(rows))
        return {row: self._decision.depths.get(row, 0) for row in rows}

    def after(self, emissions: Sequence[Emission]) -> None:
        """A step was dispatched, and these emissions of the one before it were read."""
        now = time.monotonic()
        seconds = None if self._stepped_at is None else now - self._stepped_at
        self._stepped_at = now
        for emission in emissions:
            if emission.row_id in self._contexts:
                self._contexts[emission.row_id] += len(emission.tokens)
        if not emissions:
            return
        self._policy.observe(
            StepReport(
                seconds=seconds,
                rows=len(emissions),
                depth=max(emission.drafted for emission in emissions),
                context=max(self._contexts.values(), default=0),
                outcomes=[Outcome(e.row_id, e.drafted, e.accepted) for e in emissions],
                drafted=self._dispatched.depth if self._dispatched else None,
            )
        )

    def _announce(self, decision: Decision, rows: int) -> None:
        if decision.trial:
            return
        drafting = decision.depth > 0
        if self._drafting is not None and drafting != self._drafting:
            self.transitions += 1
            log.info("%d rows: %s", rows, decision.reason)
        self._drafting = drafting
