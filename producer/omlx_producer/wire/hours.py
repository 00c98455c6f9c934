"""Hours of the day, and when the rows of a batch may begin.

Hours are those of a wall clock. A batch keeps that of its submitter as offsets from UTC, each from
the time at which it begins. So any worker can tell the hours of any batch, without a database of
time zones, and also after the clocks have changed.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omlx_producer.errors import InvalidRequest

DAY = 86_400
# Of a batch's clock; afterwards the last offset holds.
KNOWN_DAYS = 5 * 366

Offset = Callable[[float], int]
"""The seconds by which a wall clock is ahead of UTC, at seconds since 1970."""


def local_offset(at: float) -> int:
    """The `Offset` of this machine's clock."""
    return time.localtime(at).tm_gmtoff


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
        hours = cls(read_clock(start), read_clock(end))
        if hours.start == hours.end:
            raise ValueError("they are empty")
        return hours

    def __str__(self) -> str:
        return f"{_clock_text(self.start)}-{_clock_text(self.end)}"

    def rests_until(self, at: float, offset: Offset = local_offset) -> float | None:
        """When they begin next; None during them. Times are seconds since 1970."""
        clock = (at + offset(at)) % DAY
        if (clock - self.start) % DAY < (self.end - self.start) % DAY:
            return None
        return next_time(self.start, at, offset)


def read_clock(text: str) -> int:
    """The seconds since midnight at a time of day such as ``22:00``.

    Raises:
        ValueError: if it is none.
    """
    if not (found := re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", text, re.ASCII)):
        raise ValueError("it is no time of day")
    return 3600 * int(found[1]) + 60 * int(found[2])


def next_time(clock: int, at: float, offset: Offset = local_offset) -> float:
    """When a wall clock shows a time of day next; an hour that a change of clocks leaves out
    comes with the hour after it."""
    elapsed = at + (clock - at - offset(at)) % DAY
    found = elapsed + offset(at) - offset(elapsed)
    return found if (found + offset(found)) % DAY == clock else elapsed


@dataclass(frozen=True)
class When:
    """When the rows of a batch may begin. Those that run go on.

    Attributes:
        opens_at: not before, in seconds since 1970.
        hours: only in these hours of each day.
        offsets: of their clock, as in ``0:3600 1774746000:7200``: from then on these seconds.
    """

    opens_at: float | None = None
    hours: Hours | None = None
    offsets: str = ""

    @classmethod
    def of(cls, at: str | None, until: str | None, now: float) -> When:
        """Read the options ``--at`` and ``--until``, as given at a time on this machine.

        With both, rows begin between the two times of each day. With the first alone they begin
        once it has come. With the second alone the hours of each day begin at ``now``.

        Raises:
            InvalidRequest: if they are no times of day, or the same.
        """
        start, end = _option("--at", at), _option("--until", until)
        if end is None:
            return cls(None if start is None else next_time(start, now))
        if start is None:
            start = int(now + local_offset(now)) % DAY // 60 * 60
        if start == end:
            raise InvalidRequest(f"--until: got {until!r}, when the hours begin; give another time")
        return cls(hours=Hours(start, end), offsets=_known_offsets(now))

    @classmethod
    def read(cls, found: Mapping[str, str]) -> When:
        """Read the fields of a batch's hash.

        Raises:
            ValueError: if one is broken.
        """
        opens_at, hours = found.get("opens_at"), found.get("hours")
        return cls(
            float(opens_at) if opens_at else None,
            Hours.parse(hours) if hours else None,
            found.get("utc_offsets", ""),
        )

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a batch's hash, empty without hours; claim.lua reads them."""
        return {
            "opens_at": "" if self.opens_at is None else f"{self.opens_at:.0f}",
            "hours": str(self.hours or ""),
            "utc_offsets": self.offsets,
        }

    def rests_until(self, now: float) -> float | None:
        """When rows may begin; None if they may."""
        if self.opens_at is not None and now < self.opens_at:
            return self.opens_at
        return self.hours.rests_until(now, self._offset) if self.hours else None

    def _offset(self, at: float) -> int:
        pairs = [pair.split(":") for pair in self.offsets.split()]
        before = bisect_right([float(since) for since, _ in pairs], at)
        return int(pairs[before - 1][1]) if before else 0


ALWAYS = When()


def _option(name: str, given: str | None) -> int | None:
    try:
        return None if given is None else read_clock(given)
    except ValueError:
        raise InvalidRequest(f"{name}: got {given!r}; give a time of day, as in 22:00") from None


def _clock_text(clock: int) -> str:
    return f"{clock // 3600:02}:{clock // 60 % 60:02}"


def _known_offsets(now: float) -> str:
    """This machine's offsets from a time on; see `When.offsets`."""
    first = int(now) // DAY * DAY
    offsets = [(0, local_offset(first))]
    for day in range(first, first + KNOWN_DAYS * DAY, DAY):
        if local_offset(day + DAY) != offsets[-1][1]:
            before, after = day, day + DAY
            while after - before > 1:
                middle = (before + after) // 2
                same = local_offset(middle) == offsets[-1][1]
                before, after = (middle, after) if same else (before, middle)
            offsets.append((after, local_offset(day + DAY)))
    return " ".join(f"{since}:{seconds}" for since, seconds in offsets)
