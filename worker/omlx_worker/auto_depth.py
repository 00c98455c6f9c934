"""The `auto` policy: the draft depth that yields the most tokens per second, as far as is known.

Before every step it weighs each depth K by

    (rows + drafts that they accept on average at K) / seconds of a step at K

and stays with the depth it has until what a better one would have gained adds up to the price of
a change. Depths never measured with so many rows are tried at once, for a few steps each; the
others are tried again every so often, as long as that costs under 1% of the time: every step lays
by a little of its time, and a trial takes from that the seconds that it loses.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omlx_worker.acceptance_rates import AcceptanceRates
from omlx_worker.costs import FIRST, Cell, StepCosts, context_bucket, slots_for
from omlx_worker.decisions import Decision, RowView, StepReport

log = logging.getLogger(__name__)

TRIAL = FIRST + 3
"""Steps of a trial: one drafts without verifying as deep, one is read too late, and one may
compile, which leaves `FIRST` that count."""

ATTEMPTS = 6
"""Trials of a depth that was never measured with so many rows; after that, guesses must do."""

MARGIN = 0.01
"""Share by which a depth must beat the current one before its gains are counted."""

CHANGE = 0.4
"""Price of a change of depth, in steps."""

BUDGET = 0.006
"""Share of the time that trials of known depths may cost, all told; what steps lay by for them."""

SAVINGS = 10.0
"""The most that may be laid by for trials, in steps of the depth in use."""

RARE, RAREST = 160, 640
"""Steps between such trials with as many slots; twice as many after each that changes nothing."""

HOPELESS = 0.75
"""A depth never measured that seems to reach less than this share of the best speed can wait."""

RIVAL = 0.9
"""A depth that seems to reach this share of the best speed is measured for longer."""

FILE_VERSION = 2


@dataclass(slots=True)
class _Trial:
    depth: int
    cell: Cell
    left: int
    reason: str
    steps: int = TRIAL
    again: bool = False


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What each depth promises in the next step.

    Attributes:
        speeds: tokens per second, in an unknown unit if nothing is known.
        seconds: of one step, in the same unit.
        current: the depth in use.
    """

    speeds: list[float]
    seconds: list[float]
    current: int

    def share(self, depth: int) -> float:
        """A depth's speed, as a share of that of the depth in use."""
        return self.speeds[depth] / self.speeds[self.current]

    def price(self, depth: int, steps: int) -> float:
        """Seconds that so many steps at a depth lose against the depth in use."""
        return steps * self.seconds[depth] * max(1 - self.share(depth), 0.0)


class AutoPolicy:
    """Measures what steps cost and what rows accept, and drafts as deep as pays.

    Args:
        max_depth: drafts a row and step, at most.

    Attributes:
        transitions: changes of the depth in use.
        trials: times that another depth was measured.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._costs = StepCosts()
        self._rates = AcceptanceRates(max_depth)
        self._settled = 0
        self._reason = "nothing is known yet"
        self._regret = 0.0
        self._trial: _Trial | None = None
        self._attempts: dict[tuple[int, int], int] = {}
        self._last_tried: dict[tuple[int, int], int] = {}
        self._credit = 0.0
        self._intervals: defaultdict[int, int] = defaultdict(lambda: RARE)
        self._since_trial: Counter[int] = Counter()
        self._steps = 0
        self._timed = True
        self.transitions = 0
        self.trials = 0

    def choose(self, rows: Sequence[RowView], slots: int | None = None) -> Decision:
        """How deep to draft in the next step.

        Args:
            rows: those that decode.
            slots: the batch's, where known; they outnumber the rows for a while as rows leave.
        """
        self._rates.keep(row.row_id for row in rows)
        limits = {
            row.row_id: min(row.limit, self._max_depth)
            for row in rows
            if row.limit > 0 and not self._rates.rests(row.row_id)
        }
        top = max(limits.values(), default=0)
        if top == 0:
            self._trial = None
            return Decision(0, {}, "no row drafts")
        cell = (slots_for(slots or len(rows)), context_bucket(max(row.context for row in rows)))
        outlook = self._look(cell, len(rows), limits, top)
        self._earn(outlook)
        trial = self._try(cell, outlook)
        if trial:
            depth, reason = trial.depth, trial.reason
        else:
            self._settle(outlook.speeds, len(rows))
            depth, reason = min(self._settled, top), self._reason
        depths = {row_id: min(limit, depth) for row_id, limit in limits.items() if depth}
        return Decision(depth, depths, reason, trial is not None)

    def observe(self, report: StepReport) -> None:
        """Learn from a step."""
        for row_id, drafted, accepted in report.outcomes:
            self._rates.observe(row_id, drafted, accepted)
        self._steps += 1
        self._timed = report.seconds is not None
        if report.seconds is None or report.drafted not in (None, report.depth):
            return
        slots = slots_for(report.rows)
        self._last_tried[slots, report.depth] = self._steps
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

    def _look(self, cell: Cell, rows: int, limits: dict[str, int], top: int) -> _Outlook:
        accepted = self._rates.accepted(limits.items(), top)
        seconds = self._costs.estimate(cell, top)
        speeds = [(rows + extra) / time for extra, time in zip(accepted, seconds, strict=True)]
        return _Outlook(speeds, seconds, min(self._settled, top))

    def _earn(self, outlook: _Outlook) -> None:
        """Every step lays by a share of its time for trials, up to a limit."""
        step = outlook.seconds[outlook.current]
        self._credit = min(self._credit + BUDGET * step, SAVINGS * step)

    def _settle(self, speeds: list[float], rows: int) -> None:
        """Change the depth once the gains forgone add up to the price of a change."""
        current = min(self._settled, len(speeds) - 1)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        gain = speeds[best] / speeds[current] - 1
        self._regret = max(0.0, self._regret + gain - MARGIN)
        if best != current and self._regret > CHANGE:
            self._change(best, gain, rows)

    def _change(self, depth: int, gain: float, rows: int) -> None:
        count = "1 row" if rows == 1 else f"{rows} rows"
        self._reason = f"depth {depth} for {count}: {gain:+.0%} against depth {self._settled}"
        self._settled = depth
        self._regret = 0.0
        self.transitions += 1

    def _try(self, cell: Cell, outlook: _Outlook) -> _Trial | None:
        """The trial that is going on or begins now, if any."""
        trial, self._trial = self._trial, None
        self._since_trial[cell[0]] += 1
        if trial and trial.cell == cell and trial.depth < len(outlook.speeds):
            if trial.left > 1:
                trial.left -= 1
                self._trial = trial
                return trial
            self._judge(trial, outlook)
        if not self._timed:
            # Prompts are read between the steps: nothing could be learnt.
            return None
        self._trial = self._unknown(cell, outlook.speeds) or self._overdue(cell, outlook)
        if self._trial:
            self._since_trial[cell[0]] = 0
            self.trials += 1
        return self._trial

    def _judge(self, trial: _Trial, outlook: _Outlook) -> None:
        """Pay for a trial. Back off when it changed nothing; at once act upon one that did.

        A trial of a depth never measured takes what there is and leaves no debt.
        """
        slots = trial.cell[0]
        price = outlook.price(trial.depth, trial.steps)
        self._credit -= price if trial.again else min(price, max(self._credit, 0.0))
        if outlook.share(trial.depth) > 1 + MARGIN:
            self._regret = max(self._regret, CHANGE)
            self._intervals[slots] = RARE
        elif trial.again:
            self._intervals[slots] = min(2 * self._intervals[slots], RAREST)

    def _unknown(self, cell: Cell, speeds: list[float]) -> _Trial | None:
        """Measure what was never measured with so many slots, the shallowest first.

        Depths that look hopeless from those already measured are left to `_overdue`.
        """
        slots = cell[0]
        known = self._costs.known(cell)
        if len(known) > self._max_depth:
            return None
        best = max((speeds[depth] for depth in known if depth < len(speeds)), default=0.0)
        for depth in range(len(speeds)):
            attempts = self._attempts.get((slots, depth), 0)
            if depth in known or attempts >= ATTEMPTS or speeds[depth] < HOPELESS * best:
                continue
            self._attempts[slots, depth] = attempts + 1
            return _Trial(depth, cell, TRIAL, f"measuring depth {depth} with {slots} slots")
        return None

    def _overdue(self, cell: Cell, outlook: _Outlook) -> _Trial | None:
        """Now and then another depth: close rivals often and longer, others every third time."""
        if self._since_trial[cell[0]] < self._intervals[cell[0]]:
            return None
        urgency = {}
        # What costs more than can be laid by is bought on credit, once the savings are full.
        most = 0.99 * SAVINGS * outlook.seconds[outlook.current]
        for depth in range(len(outlook.speeds)):
            share = min(outlook.share(depth), 1.0)
            price = min(outlook.price(depth, _length(share)), most)
            if depth != outlook.current and price <= self._credit:
                age = self._steps - self._last_tried.get((cell[0], depth), 0)
                urgency[depth] = age if self.trials % 3 == 0 else age * share**4
        if not urgency:
            return None
        depth = max(urgency, key=urgency.__getitem__)
        steps = _length(outlook.share(depth))
        return _Trial(depth, cell, steps, f"looking at depth {depth} again", steps, again=True)


def _length(share: float) -> int:
    """Steps of a trial of a depth that seems to reach this share of the current speed."""
    return 2 * TRIAL if share > RIVAL else TRIAL
