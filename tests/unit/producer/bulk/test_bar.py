"""The bar of a run, as a terminal shows it."""

from __future__ import annotations

import logging
import sys
from collections import Counter

import pytest

from omlx_producer.bulk import progress
from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.bulk.progress import Bar
from omlx_producer.terminal import write
from tests.helpers.screens import attach

WIDTHS = (60, 80, 120, 200)


@pytest.fixture
def meter() -> Meter:
    """A long run in its middle."""
    clock = iter(range(10_000))
    meter = Meter(total=500_000, before=120_000, clock=lambda: 75.0 * next(clock))
    meter.ok, meter.reasons = 3_456, Counter(failed=12)
    meter.drafted, meter.accepted = 100, 62
    meter.now = Speed(running=16, tokens_in=1234.5, tokens_out=432.1)
    return meter


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_bar_is_one_line_with_the_rows_at_any_width(
    monkeypatch: pytest.MonkeyPatch, meter: Meter, columns: int
) -> None:
    screen = attach(monkeypatch, columns)
    bar = Bar()
    for _ in range(3):
        bar.update(meter)
    [line] = screen.lines
    assert line.startswith("123,468/500,000 ")
    assert len(line) <= columns - len("^C")
    assert "\u2501" * 8 in line.replace("\u2578", "\u2501").replace("\u257a", "\u2501")
    assert ("left, 12 failed, 16 running" in line) == (columns >= 80)
    assert ("62% accepted" in line) == (columns >= 120)


@pytest.mark.parametrize("columns", WIDTHS)
def test_notices_stand_above_the_bar(
    monkeypatch: pytest.MonkeyPatch, meter: Meter, columns: int
) -> None:
    screen = attach(monkeypatch, columns)
    bar = Bar()
    bar.update(meter)
    write("line 7: \x1b[31mtext\n", err=True)
    write("a short notice\n", err=True)
    logging.lastResort.handle(logging.makeLogRecord({"msg": "a warning", "levelno": 30}))  # type: ignore[union-attr]
    bar.update(meter)
    *notices, line = screen.lines
    assert notices == ["line 7: \\x1b[31mtext", "a short notice", "a warning"]
    assert line.startswith("123,468/500,000 ")


def test_the_echo_of_an_interrupt_goes_with_the_next_turn(
    monkeypatch: pytest.MonkeyPatch, meter: Meter
) -> None:
    screen = attach(monkeypatch, 60)
    bar = Bar()
    bar.update(meter)
    assert sys.stderr.isatty()
    screen.feed(b"^C")
    bar.update(meter)
    [line] = screen.lines
    assert "^C" not in line


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_bar_stays_above_the_summary(
    monkeypatch: pytest.MonkeyPatch, meter: Meter, columns: int
) -> None:
    screen = attach(monkeypatch, columns)
    bar = Bar()
    bar.update(meter)
    bar.end(meter)
    first, second, *_ = screen.lines
    assert first.startswith("123,468/500,000 ")
    assert second.startswith("3468 rows in ")


def test_a_terminal_whose_width_is_not_known_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, meter: Meter
) -> None:
    screen = attach(monkeypatch, 80)
    monkeypatch.setenv("COLUMNS", "0")
    Bar().update(meter)
    [line] = screen.lines
    assert line.startswith("123,468/500,000 ")


def test_without_a_total_the_rows_so_far_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = attach(monkeypatch, 60)
    bar = Bar()
    bar.update(Meter(before=1200))
    [line] = screen.lines
    assert line.startswith("1,200 rows ")
