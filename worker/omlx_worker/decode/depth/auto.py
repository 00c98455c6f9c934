"""The `auto` policy: the draft depth that yields the most tokens per second, as far as is known.

Before every step it weighs each depth K by

    (rows + drafts that they accept on average at K) / seconds of a step at K

and stays with the depth it has until what a better one would have gained adds up to the price of
a change. Now and then another depth is tried; see `omlx_worker.decode.depth.depth_trials`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omlx_worker.decode.depth.acceptance_rates import AcceptanceRates
from omlx_worker.decode.depth.costs import Cell, StepCosts, context_bucket, slots_for
from omlx_worker.decode.depth.decisions import Decision, RowView, StepReport
from omlx_worker.decode.depth.depth_trials import DepthTrial, DepthTrials
from omlx_worker.decode.depth.outlook import Outlook

log = logging.getLogger(__name__)

MARGIN = 0.005
"""Share by which a depth must beat the current one before its gains are counted."""

CHANGE = 0.4
"""Price of a change of depth, in steps."""

HOLD = 8
"""Steps, prompts being read between them, for which nobody drafts deeper than when a row was about
to join: more are likely to, and each time that drafting begins the head has to catch up."""

FILE_VERSION = 2


class AutoPolicy:
    """Measures what steps cost and what rows accept, and drafts as deep as pays.

    Args:
        max_depth: drafts a row and step, at most.

    Attributes:
        transitions: changes of the depth in use.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._costs = StepCosts()
        self._rates = AcceptanceRates(max_depth)
        self._settled = 0
        self._settled_with: dict[int, tuple[int, str]] = {}
        self._reason = "nothing is known yet"
        self._regret = 0.0
        self._trials = DepthTrials()
        self._timed = True
        self._held = self._hold = 0
        self.transitions = 0

    @property
    def trials(self) -> int:
        """Times that another depth was measured."""
        return self._trials.count

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int | None = None,
        coming: int = 0,
        *,
        reading: bool = False,
    ) -> Decision:
        """How deep to draft in the next step.

        Args:
            rows: those that decode.
            slots: the batch's, where known; they outnumber the rows for a while as rows leave.
            coming: rows that join one by one, each after another step.
            reading: whether prompts are read between the steps.
        """
        self._rates.keep(row.row_id for row in rows)
        limits = {
            row.row_id: min(row.limit, self._max_depth)
            for row in rows
            if row.limit > 0 and not self._rates.rests(row.row_id)
        }
        top = max(limits.values(), default=0)
        if top == 0:
            self._trials.stop()
            return Decision(0, {}, "no row drafts")
        cell = (slots_for(slots or len(rows)), context_bucket(max(row.context for row in rows)))
        outlook = self._take_up(self._look(cell, len(rows), limits, top), cell)
        if coming:
            self._trials.stop()
            depth = self._until_joined(outlook, cell, len(rows), coming)
            self._held, self._hold = depth, HOLD
            return self._decide(depth, limits, f"{coming} more rows join", passing=True)
        self._hold = max(0, self._hold - 1) if reading else 0
        if self._hold and self._held < outlook.current:
            self._trials.stop()
            return self._decide(self._held, limits, "prompts are read", passing=True)
        self._trials.earn(outlook)
        trial = self._try(cell, outlook)
        if trial:
            depth, reason = trial.depth, trial.reason
        else:
            self._settle(outlook, cell[0])
            depth, reason = min(self._settled, top), self._reason
        return self._decide(depth, limits, reason, passing=trial is not None)

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        for row_id, drafted, accepted in report.outcomes:
            self._rates.observe(row_id, drafted, accepted)
        tokens = sum(1 + outcome.accepted for outcome in report.outcomes)
        self._trials.stepped(report.seconds, tokens)
        self._timed = report.seconds is not None and not report.turns
        if report.seconds is None or report.changes_depth:
            return
        slots = slots_for(report.rows)
        self._trials.measured(slots, report.depth)
        self._costs.observe((slots, context_bucket(report.context)), report.depth, report.seconds)

    def save(self, path: Path, key: str) -> None:
        """Write what is known to a small file, for the same model, device and software only.

        Args:
            key: names all three.
        """
        known = {
            "version": FILE_VERSION,
            "key": key,
            "costs": self._costs.to_json(),
            "acceptance": self._rates.to_json(),
        }
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(known))
        part.replace(path)

    def load(self, path: Path, key: str) -> bool:
        """Take up what an earlier run knew; anything wrong with the file leaves all as it was.

        Returns:
            Whether there was something to take up.
        """
        try:
            known: Any = json.loads(path.read_text())
            if (known["version"], known["key"]) != (FILE_VERSION, key):
                log.info("%s is about another model, device or version: measuring anew", path)
                return False
            costs = StepCosts.from_json(known["costs"])
            self._rates.restore(known["acceptance"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, TypeError, LookupError) as error:
            log.warning("cannot use %s (%s): measuring anew", path, error)
            return False
        self._costs = costs
        return True

    @staticmethod
    def _decide(depth: int, limits: dict[str, int], reason: str, *, passing: bool) -> Decision:
        depths = {row_id: min(limit, depth) for row_id, limit in limits.items() if depth}
        return Decision(depth, depths, reason, passing)

    def _until_joined(self, outlook: Outlook, cell: Cell, rows: int, coming: int) -> int:
        """The depth that costs least while rows join, each of which waits for a step to pass.

        Time is worth what all of them together will make of it, which those that are there cannot
        make good. So drafts that do not pay for all do not for some; that is known better, for
        there seldom is time to measure how long steps with so few rows take.
        """
        whole = rows + coming
        seconds = self._costs.estimate((slots_for(whole), cell[1]), len(outlook.speeds) - 1)
        tokens = [outlook.tokens(depth) for depth in range(len(outlook.speeds))]
        speeds = [made * whole / rows / time for made, time in zip(tokens, seconds, strict=True)]
        worth = max(speeds)
        gains = [made - worth * time for made, time in zip(tokens, outlook.seconds, strict=True)]
        return max(range(speeds.index(worth) + 1), key=gains.__getitem__)

    def _look(self, cell: Cell, rows: int, limits: dict[str, int], top: int) -> Outlook:
        accepted = self._rates.accepted(limits.items(), top)
        seconds = self._costs.estimate(cell, top)
        speeds = [(rows + extra) / time for extra, time in zip(accepted, seconds, strict=True)]
        return Outlook(speeds, seconds, min(self._settled, top))

    def _take_up(self, outlook: Outlook, cell: Cell) -> Outlook:
        """Go on with the depth that was last used with so many slots.

        With a number not met in this run it is the best, if that and another have been measured.
        """
        slots, best = cell[0], outlook.best
        if slots not in self._settled_with:
            known = self._costs.known(cell)
            if best in known and len(known) > 1:
                self._settled, self._reason = best, f"depth {best}: the best when last measured"
            self._settled_with[slots] = self._settled, self._reason
        self._settled, self._reason = self._settled_with[slots]
        return replace(outlook, current=min(self._settled, len(outlook.speeds) - 1))

    def _settle(self, outlook: Outlook, slots: int) -> None:
        """Change the depth once the gains forgone add up to the price of a change."""
        best = outlook.best
        gain = outlook.share(best) - 1
        self._regret = max(0.0, self._regret + gain - MARGIN)
        if best != outlook.current and self._regret > CHANGE:
            self._trials.left(slots, outlook.current)
            self._reason = f"depth {best}: {gain:+.0%} against depth {self._settled}"
            self._settled = best
            self._settled_with[slots] = best, self._reason
            self._regret = 0.0
            self.transitions += 1

    def _try(self, cell: Cell, outlook: Outlook) -> DepthTrial | None:
        """The trial that is going on or begins now, if any; one that showed a better depth is acted
        upon at once."""
        trial, ended = self._trials.go_on(cell, len(outlook.speeds))
        if ended:
            changes = ended.depth == outlook.best and outlook.share(ended.depth) > 1 + MARGIN
            self._trials.judge(ended, outlook, changes=changes)
            if changes:
                self._regret = max(self._regret, CHANGE)
        # Where prompts are read between the steps, nothing could be learnt.
        if trial is None and self._timed:
            trial = self._trials.begin(cell, outlook, self._costs.known(cell))
        return trial
