"""Hours of the day, by the clock of this machine."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

DAY = 86_400


@dataclass(frozen=True)
class Hours:
    """A part of each day, in seconds since midnight; it may go past midnight."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Read hours such as ``22:00-07:00``.

        Raises:
            ValueError: if they are none.
        """
        start, _, end = text.partition("-")
        hours = cls(_read_clock(start), _read_clock(end))
        if hours.start == hours.end:
            raise ValueError("they are empty")
        return hours

    def rests_until(self, at: float) -> float | None:
        """When they begin next; None during them. Times are seconds since 1970."""
        if (_clock(at) - self.start) % DAY < (self.end - self.start) % DAY:
            return None
        elapsed = at + (self.start - _clock(at)) % DAY
        # A start that a change of clocks leaves out is an hour later on the clock.
        found = elapsed + _offset(at) - _offset(elapsed)
        return found if _clock(found) == self.start else elapsed


def _read_clock(text: str) -> int:
    """The seconds since midnight at a time of day such as ``22:00``.

    Raises:
        ValueError: if it is none.
    """
    if not (found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text, re.ASCII)):
        raise ValueError("it is no time of day")
    return 3600 * int(found[1]) + 60 * int(found[2])


def _clock(at: float) -> float:
    """The seconds since midnight on this machine's clock."""
    return (at + _offset(at)) % DAY


def _offset(at: float) -> int:
    """The seconds by which this machine's clock is ahead of UTC."""
    return time.localtime(at).tm_gmtoff
