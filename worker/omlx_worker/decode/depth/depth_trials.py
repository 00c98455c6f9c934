"""When to measure another draft depth than the one in use, and which.

Depths never measured with so many slots are tried at once, for a few steps each. The others are
tried again every so often, as long as that costs under 1% of the time: every step lays by a little
of its time, and a trial takes from that the seconds that it loses. Where steps have come to take
another time than when others were last looked at, somebody else uses the machine, or no longer,
and all of them are looked at again soon; as are those known from an earlier run alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from omlx_worker.decode.depth.costs import Cell
from omlx_worker.decode.depth.joint_costs import FIRST
from omlx_worker.decode.depth.outlook import Outlook
from omlx_worker.decode.depth.trial_bills import TrialBills

TRIAL = FIRST + 3
"""Steps of a trial: one drafts without verifying as deep, one is read too late, and one may
compile, which leaves `FIRST` that count."""

ATTEMPTS = 6
"""Trials of a depth that was never measured with so many rows; after that, guesses must do."""

BUDGET = 0.005
"""Share of the time that trials of known depths may cost, all told; what steps lay by for them."""

SAVINGS = 10.0
"""The most that may be laid by for trials, in steps of the depth in use."""

STALLED = 40.0
"""A step that takes so many times as long as usual is no doing of a trial. The head's reading of
all that it has missed may be: that counts."""

RARE, RAREST = 160, 640
"""Steps between such trials with as many slots; twice as many after each that changes nothing."""

DRIFT = 1.15
"""Other depths are in doubt once a step takes so many times as long as it used to, or the other
way round."""

SOON = 48
"""Steps between trials of depths that are in doubt."""

LOOK_BACK = 96
"""Steps after which a depth that was left is looked at again, on credit if need be."""

HOPELESS = 0.8
"""A depth never measured that seems to reach less than this share of the best speed can wait."""

SUSPECT = 1.2
"""A depth that seems to take so many times as long as its neighbours make expect, and would be the
best if it took no longer, is measured again: it may have met with a slow moment."""

MOST_AGAIN = 2
"""Such trials of a depth with as many slots."""

RIVAL = 0.9
"""A depth that seems to reach this share of the best speed is measured for longer."""


@dataclass(slots=True)
class DepthTrial:
    """A trial that is going on.

    Attributes:
        left: steps, the next one included.
        steps: all of them.
        again: whether the depth was measured before.
    """

    depth: int
    cell: Cell
    left: int
    reason: str
    steps: int = TRIAL
    again: bool = False


class DepthTrials:
    """Trials of the past, the one that is going on, and the time laid by for more.

    Attributes:
        count: trials that were begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self._going_on: DepthTrial | None = None
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._again: Counter[tuple[int, int]] = Counter()
        self._last_tried: dict[tuple[int, int], int] = {}
        self._measured = (0, 0)
        self._in_a_row = 0
        self._credit = 0.0
        self._intervals: defaultdict[int, int] = defaultdict(lambda: RARE)
        self._since: Counter[int] = Counter()
        self._usual: dict[Cell, tuple[int, float]] = {}
        self._doubtful: defaultdict[int, set[int]] = defaultdict(set)
        self._left: dict[int, tuple[int, int]] = {}
        self._steps = 0
        self._bills = TrialBills()

    def stepped(self, seconds: float | None, tokens: int) -> None:
        """A step has been heard of.

        Args:
            seconds: since the one before; None if they say nothing.
            tokens: that came of it, of all rows.
        """
        self._steps += 1
        self._bills.stepped(seconds, tokens)

    def measured(self, slots: int, depth: int) -> None:
        """Its time counted. A depth was looked at when so many in a row have as make it known: the
        few steps while rows join are no look at it."""
        kind = (slots, depth)
        self._in_a_row = self._in_a_row + 1 if kind == self._measured else 1
        self._measured = kind
        if self._in_a_row >= FIRST:
            self._last_tried[kind] = self._steps

    def left(self, slots: int, depth: int) -> None:
        """Another depth is used from now on with so many slots.

        What was known of the one that is left may be that of a bad moment, and the moment the
        reason to leave it: it is looked at again soon. One that was not in use here is not.
        """
        if (slots, depth) in self._last_tried:
            self._left[slots] = (depth, self._steps)

    def earn(self, outlook: Outlook) -> None:
        """Every step lays by a share of its time for trials, up to a limit."""
        step = outlook.seconds[outlook.current]
        self._credit = min(self._credit + BUDGET * step, SAVINGS * step)

    def stop(self) -> None:
        """Nothing is decoded that could draft."""
        self._going_on = None

    def go_on(self, cell: Cell, depths: int) -> tuple[DepthTrial | None, DepthTrial | None]:
        """The trial that goes on in the next step, and the one that has just ended, if any.

        Args:
            depths: how many there are to choose from.
        """
        trial, self._going_on = self._going_on, None
        self._since[cell[0]] += 1
        if trial is None or trial.cell != cell or trial.depth >= depths:
            return None, None
        if trial.left == 1:
            return None, trial
        trial.left -= 1
        self._going_on = trial
        return trial, None

    def judge(self, trial: DepthTrial, outlook: Outlook, *, changes: bool) -> None:
        """Pay for a trial, and back off when it changed nothing.

        One of a depth never measured takes what there is and leaves no debt.
        """
        slots = trial.cell[0]
        surcharge = self._bills.surcharge((slots, outlook.current))
        price = outlook.price(trial.depth, trial.steps) + surcharge
        self._credit -= price if trial.again else min(price, max(self._credit, 0.0))
        if changes:
            self._intervals[slots] = RARE
        elif trial.again:
            self._intervals[slots] = min(2 * self._intervals[slots], RAREST)

    def begin(self, cell: Cell, outlook: Outlook, known: Collection[int]) -> DepthTrial | None:
        """The trial that begins now, if any.

        Args:
            known: depths measured with so many slots.
        """
        trial = (
            self._unknown(cell, outlook.speeds, known)
            or self._out_of_line(cell, outlook, known)
            or self._overdue(cell, outlook, known)
        )
        self._going_on = trial
        if trial is None:
            return None
        self._since[cell[0]] = 0
        self.count += 1
        if trial.again:
            expected = outlook.price(trial.depth, trial.steps)
            speed = outlook.speeds[outlook.current]
            most = STALLED * outlook.seconds[outlook.current]
            self._bills.open((cell[0], outlook.current), trial.steps, expected, speed, most)
        return trial

    def _unknown(
        self, cell: Cell, speeds: list[float], known: Collection[int]
    ) -> DepthTrial | None:
        """Measure what was never measured with so many slots, the shallowest first.

        Depths that look hopeless from those already measured are left to `_overdue`.
        """
        slots = cell[0]
        best = max((speeds[depth] for depth in known if depth < len(speeds)), default=0.0)
        for depth in range(len(speeds)):
            tried_enough = self._attempts[slots, depth] >= ATTEMPTS
            if depth in known or tried_enough or speeds[depth] < HOPELESS * best:
                continue
            self._attempts[slots, depth] += 1
            return DepthTrial(depth, cell, TRIAL, f"measuring depth {depth} with {slots} slots")
        return None

    def _out_of_line(
        self, cell: Cell, outlook: Outlook, known: Collection[int]
    ) -> DepthTrial | None:
        """Measure once more, a while later, what seems too slow to be true."""
        slots, depths = cell[0], range(len(outlook.speeds))
        if len(depths) < 3 or not set(depths) <= set(known):
            return None
        for depth in depths:
            kind, line = (slots, depth), outlook.in_line(depth)
            hopeful = outlook.tokens(depth) / line > outlook.speeds[outlook.best]
            if depth == outlook.current or outlook.seconds[depth] < SUSPECT * line or not hopeful:
                continue
            since = self._steps - self._last_tried.get(kind, 0)
            if self._again[kind] < MOST_AGAIN and since >= SOON:
                self._again[kind] += 1
                return DepthTrial(depth, cell, TRIAL, f"measuring depth {depth} once more")
        return None

    def _overdue(self, cell: Cell, outlook: Outlook, known: Collection[int]) -> DepthTrial | None:
        """Now and then another depth: close rivals often and longer, others every third time."""
        slots = cell[0]
        recalled = self._recalled(slots, outlook, known)
        doubtful = self._in_doubt(cell, outlook)
        if self._may_look_back(slots, outlook):
            depth, _ = self._left.pop(slots)
            return DepthTrial(depth, cell, TRIAL, f"looking back at depth {depth}", again=True)
        if self._since[slots] < (SOON if doubtful or recalled else self._intervals[slots]):
            return None
        urgency = {}
        # What costs more than can be laid by is bought on credit, once the savings are full.
        most = 0.99 * SAVINGS * outlook.seconds[outlook.current]
        others = set(range(len(outlook.speeds))) - {outlook.current}
        for depth in doubtful | recalled or others:
            share = min(outlook.share(depth), 1.0)
            price = min(outlook.price(depth, _length(share)), most)
            if price <= self._credit or (depth in recalled and self._may_owe(outlook)):
                age = self._steps - self._last_tried.get((slots, depth), 0)
                urgency[depth] = age if self.count % 3 == 0 else age * share**4
        if not urgency:
            return None
        depth = max(urgency, key=urgency.__getitem__)
        doubtful.discard(depth)
        steps = _length(outlook.share(depth))
        return DepthTrial(depth, cell, steps, f"looking at depth {depth} again", steps, again=True)

    def _may_look_back(self, slots: int, outlook: Outlook) -> bool:
        """Whether the depth that was left is due, and is paid for or may be owed."""
        depth, step = self._left.get(slots, (outlook.current, 0))
        if depth == outlook.current or depth >= len(outlook.speeds):
            return False
        if self._last_tried.get((slots, depth), 0) > step + TRIAL:
            return False
        return self._steps - step >= LOOK_BACK and self._may_owe(outlook)

    def _may_owe(self, outlook: Outlook) -> bool:
        """Whether half of what can be laid by is not owed."""
        return -self._credit / outlook.seconds[outlook.current] < SAVINGS / 2

    def _recalled(self, slots: int, outlook: Outlook, known: Collection[int]) -> set[int]:
        """Rivals that an earlier run measured and this one has not: had that been in a bad moment,
        it would be believed for long."""
        return {
            depth
            for depth, speed in enumerate(outlook.speeds)
            if depth in known
            and depth != outlook.current
            and (slots, depth) not in self._last_tried
            and speed > HOPELESS * outlook.speeds[outlook.best]
        }

    def _in_doubt(self, cell: Cell, outlook: Outlook) -> set[int]:
        """The depths that have not been looked at since steps came to take another time."""
        current, now = outlook.current, outlook.seconds[outlook.current]
        depth, usual = self._usual.setdefault(cell, (current, now))
        doubtful = self._doubtful[cell[0]]
        if depth != current:
            self._usual[cell] = (current, now)
        elif not usual / DRIFT < now < usual * DRIFT:
            self._usual[cell] = (current, now)
            # What was laid by is to pay for as many steps as before.
            self._credit *= now / usual
            doubtful.update(range(len(outlook.speeds)))
        doubtful.intersection_update(range(len(outlook.speeds)))
        doubtful.discard(current)
        return doubtful


def _length(share: float) -> int:
    """Steps of a trial of a depth that seems to reach this share of the current speed."""
    return 2 * TRIAL if share > RIVAL else TRIAL
