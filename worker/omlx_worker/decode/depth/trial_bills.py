"""What trials of another draft depth cost beyond what their steps do.

A batch that did not draft and does again lets its head read what it has missed, which may take as
long as several steps; and the first step of a trial drafts without verifying as deep. No step's own
time tells, so a whole trial is compared with what the depth in use would have made of its time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque

REMEMBERED = 5
"""Trials whose median counts, as soon as there are two: any one may have met with anything."""

LAG = 2
"""Steps around a trial that are its doing: the one heard of while the head catches up, and the one
after its last, which has other drafts to judge than it is deep."""

Leaving = tuple[int, int]
"""Slots, and the depth in use."""


class TrialBills:
    """Surcharges of late, and the trial that is being accounted for."""

    def __init__(self) -> None:
        self._surcharges: defaultdict[Leaving, deque[float]] = defaultdict(
            lambda: deque(maxlen=REMEMBERED)
        )
        self._leaving: Leaving = (0, 0)
        self._speed = 0.0
        self._left = 0
        self._bill = 0.0
        self._most = 0.0

    def open(
        self, leaving: Leaving, steps: int, expected: float, speed: float, most: float
    ) -> None:
        """A trial of so many steps begins.

        Args:
            expected: seconds that its steps should lose.
            speed: tokens per second at the depth in use.
            most: seconds of a step; what takes longer is no doing of a trial.
        """
        self._most = most
        self._leaving, self._speed = leaving, speed
        self._left, self._bill = steps + LAG, -expected

    def stepped(self, seconds: float | None, tokens: int) -> None:
        """A step has been heard of; where its time says nothing, the trial is not accounted for."""
        if not self._left:
            return
        if seconds is None or seconds > self._most:
            self._left = 0
            return
        self._left -= 1
        self._bill += seconds - tokens / self._speed
        if not self._left:
            self._surcharges[self._leaving].append(max(self._bill, 0.0))

    def surcharge(self, leaving: Leaving) -> float:
        """Seconds that a trial costs beyond its steps, as far as is known."""
        known = self._surcharges[leaving]
        return statistics.median_low(known) if len(known) > 1 else 0.0
