"""Seconds of a step at each draft depth, known together: a Kalman filter over their logarithms.

Whoever else uses the machine slows all depths down by a share, and a growing context nearly so.
So the time of one depth tells of the others too, by as much as all have moved together since they
were seen. What a depth that is little known turns out to cost is news of it alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST, MOST_FIRST = 3, 12
"""Observations of a depth that make it known, if they agree, and that do if they never agree."""

AGREEMENT = 0.06
"""The standard error of their mean, as a share of it, at which observations agree."""

NOISE, LEAST_NOISE = 0.05, 0.02
"""By what share a step's time is taken to be off until many were seen, and at least."""

NOISE_GAIN = 0.03
"""Weight of one more step in what the noise is taken to be."""

TOGETHER = 0.0064
"""Variance that all depths gain together with every step, as a share of that of the noise: one more
observation of a depth in use for long then counts for 8%."""

APART, LEAST_APART = 2e-4, 1e-6
"""What each depth gains by itself, as a share of the noise's variance, and what besides."""

START = 0.15
"""By what share a depth's first observations may be off, whatever they say of it."""

CLIP = 0.25
"""What a step may be off, as a share, without being an outlier, however little noise there is."""

CLIP_SPREADS = 2.0
"""The same in standard deviations of what was expected."""

STEADY = 12
"""Steps in a row of one depth after which it is the one in use: when it jumps, all do."""

REMEMBERED_APART, REMEMBERED_TOGETHER = 0.05, 0.3
"""By what share times of an earlier run may be off each by itself, and all together."""


@dataclass(slots=True)
class _First:
    """What was seen of a depth before it was known; the very first compiles and does not count."""

    compiled: bool = False
    seconds: list[float] = field(default_factory=list)


class JointCosts:
    """What steps of one size cost; knows a depth once its first observations agree."""

    def __init__(self) -> None:
        self._logs: dict[int, float] = {}
        self._spread: dict[tuple[int, int], float] = {}
        self._noise = NOISE**2
        self._first: dict[int, _First] = {}
        self._strays: list[float] = []
        self._last = self._in_use = -1
        self._run = 0

    @property
    def known(self) -> dict[int, float]:
        """Seconds at every depth that is known."""
        return {depth: math.exp(log) for depth, log in self._logs.items()}

    def recall(self, depth: int, seconds: float) -> None:
        """Take up what an earlier run knew: known, but soon outweighed."""
        shared = REMEMBERED_TOGETHER**2
        for other in self._logs:
            self._spread[depth, other] = self._spread[other, depth] = shared
        self._logs[depth] = math.log(seconds)
        self._spread[depth, depth] = shared + REMEMBERED_APART**2

    def observe(self, depth: int, seconds: float) -> None:
        """Take in a step's time."""
        if depth != self._last:
            self._last, self._run, self._strays = depth, 0, []
        self._run += 1
        if self._run > STEADY:
            self._in_use = depth
        together, apart = TOGETHER * self._noise, APART * self._noise + LEAST_APART
        for one, another in self._spread:
            self._spread[one, another] += together + (apart if one == another else 0.0)
        if depth in self._logs:
            self._correct(depth, math.log(seconds))
        else:
            self._meet(depth, seconds)

    def _meet(self, depth: int, seconds: float) -> None:
        first = self._first.setdefault(depth, _First())
        if not first.compiled:
            first.compiled = True
            return
        first.seconds.append(seconds)
        count = len(first.seconds)
        if not (count == MOST_FIRST or _agree(first.seconds)):
            return
        usual = _usual(first.seconds)
        mean = statistics.fmean(usual)
        noise = max(self._noise, statistics.variance(usual) / mean**2)
        for other in self._logs:
            self._spread[depth, other] = self._spread[other, depth] = 0.0
        self._logs[depth] = math.log(mean)
        self._spread[depth, depth] = noise / len(usual) + START**2
        del self._first[depth]

    def _correct(self, depth: int, log: float) -> None:
        own = self._spread[depth, depth]
        expected = own + self._noise
        most = max(CLIP, CLIP_SPREADS * math.sqrt(expected))
        off = log - self._logs[depth]
        if abs(off) > most:
            self._stray(depth, log, math.copysign(most, off) / expected)
            return
        self._strays = []
        shares = self._move(depth, off / expected)
        for one, another in self._spread:
            self._spread[one, another] -= shares[one] * shares[another] / expected
        noise = self._noise + NOISE_GAIN * (off**2 - expected)
        self._noise = max(noise, LEAST_NOISE**2)

    def _stray(self, depth: int, log: float, off: float) -> None:
        """An outlier counts in part and makes nothing surer; as many that agree are believed."""
        self._strays = [*self._strays, log][-FIRST:]
        if len(self._strays) < FIRST or max(self._strays) - min(self._strays) > CLIP:
            self._move(depth, off)
            return
        jump = statistics.median(self._strays) - self._logs[depth]
        for other in self._logs if depth == self._in_use else [depth]:
            self._logs[other] += jump
        self._strays = []

    def _move(self, depth: int, off: float) -> dict[int, float]:
        """Move all depths, each by its covariance with this one; returns those."""
        shares = {other: self._spread[depth, other] for other in self._logs}
        for other, share in shares.items():
            self._logs[other] += share * off
        return shares


def _usual(seconds: Sequence[float]) -> Sequence[float]:
    """Without the one furthest off, which may be anything."""
    middle = statistics.median(seconds)
    nearest = sorted(seconds, key=lambda one: abs(one - middle))
    return nearest[: max(1, len(seconds) - 1)]


def _agree(seconds: Sequence[float]) -> bool:
    """Whether the mean of what is usual is known well enough."""
    if len(seconds) < FIRST:
        return False
    usual = _usual(seconds)
    error = statistics.stdev(usual) / math.sqrt(len(usual))
    return error <= AGREEMENT * statistics.fmean(usual)
