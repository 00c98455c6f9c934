"""Hours of the day, also past midnight and where the clocks change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from omlx_worker.hours import Hours

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(autouse=True)
def _in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp()


def shown(seconds: float | None) -> str | None:
    return seconds and datetime.fromtimestamp(seconds, BERLIN).strftime("%m-%d %H:%M")


@pytest.mark.parametrize(
    ("hours", "now", "until"),
    [
        ("22:00-07:00", "2026-01-05 21:59:59", "01-05 22:00"),
        ("22:00-07:00", "2026-01-05 22:00", None),
        ("22:00-07:00", "2026-01-06 06:59:59", None),
        ("22:00-07:00", "2026-01-06 07:00", "01-06 22:00"),
        ("9:00-17:30", "2026-01-06 17:29", None),
        ("9:00-17:30", "2026-01-06 17:30", "01-07 09:00"),
        # The clocks go from 02:00 to 03:00 on March 29th, and from 03:00 to 02:00 on October 25th.
        ("05:00-06:00", "2026-03-28 23:00", "03-29 05:00"),
        ("05:00-06:00", "2026-10-24 23:00", "10-25 05:00"),
        ("05:00-06:00", "2026-03-28 05:30", None),
        ("05:00-06:00", "2026-03-29 05:30", None),
        ("02:30-04:00", "2026-03-29 00:00", "03-29 03:30"),
        ("02:30-04:00", "2026-03-29 03:10", None),
    ],
)
def test_hours_are_those_of_the_wall_clock(hours: str, now: str, until: str | None) -> None:
    assert shown(Hours.parse(hours).rests_until(at(now))) == until


@pytest.mark.parametrize("given", ["24:00", "7", "7:5", "\u0660\u0667:00", "22:00:00", "", "night"])
def test_what_is_no_time_of_day_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="no time of day"):
        Hours.parse(f"07:00-{given}")


def test_hours_that_end_as_they_begin_are_refused() -> None:
    with pytest.raises(ValueError, match="they are empty"):
        Hours.parse("07:00-7:00")
