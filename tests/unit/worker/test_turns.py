"""Which model a worker of several loads next."""

from __future__ import annotations

import pytest

from omlx_producer.wire import Priority
from omlx_worker.control.turns import Place, Turns
from tests.helpers.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def turns(clock: Clock) -> Turns:
    """Bulk jobs wait 600 s for the work of another model, default ones 120 s, high ones 30 s."""
    return Turns(600.0, clock)


@pytest.mark.parametrize(("level", "seconds"), [("high", 30), ("default", 120), ("bulk", 600)])
def test_jobs_wait_for_a_busy_model_as_long_as_their_level_says(
    turns: Turns, clock: Clock, level: Priority, seconds: float
) -> None:
    waiting = [("b", level)]
    assert turns.next(waiting, busy=True) is None
    clock.now = seconds - 1
    assert turns.next(waiting, busy=True) is None
    clock.now = seconds
    assert turns.next(waiting, busy=True) == "b"


def test_jobs_do_not_wait_for_an_idle_model(turns: Turns) -> None:
    assert turns.next([("b", "bulk")], busy=False) == "b"


def test_without_jobs_for_others_the_model_stays(turns: Turns) -> None:
    assert turns.next([], busy=False) is None


def test_after_an_idle_model_the_best_level_is_next_then_who_has_waited_longest(
    turns: Turns, clock: Clock
) -> None:
    turns.next([("c", "bulk")], busy=True)
    clock.now = 5
    assert turns.next([("b", "bulk"), ("c", "bulk")], busy=False) == "c"
    assert turns.next([("b", "default"), ("c", "bulk")], busy=False) == "b"


def test_who_has_waited_too_long_goes_before_a_better_level(turns: Turns, clock: Clock) -> None:
    turns.next([("c", "bulk")], busy=True)
    clock.now = 601
    assert turns.next([("b", "high"), ("c", "bulk")], busy=False) == "c"


def test_a_loaded_model_serves_for_a_while_whoever_has_waited_too_long(
    turns: Turns, clock: Clock
) -> None:
    waiting: list[Place] = [("b", "bulk"), ("c", "high")]
    turns.next(waiting, busy=True)
    clock.now = 1000
    turns.loaded(5)
    clock.now = 1029
    assert turns.next(waiting, busy=True) is None
    clock.now = 1030
    assert turns.next(waiting, busy=True) == "c"


def test_a_wait_begins_anew_once_nothing_waits(turns: Turns, clock: Clock) -> None:
    turns.next([("b", "high")], busy=True)
    clock.now = 29
    turns.next([], busy=True)
    clock.now = 31
    assert turns.next([("b", "high")], busy=True) is None


def test_a_model_that_another_worker_has_interrupts_none_and_gets_help_from_the_idle(
    turns: Turns, clock: Clock
) -> None:
    waiting = [("b", "bulk")]
    assert turns.next(waiting, {"b"}, busy=False) is None
    clock.now = 30
    assert turns.next(waiting, {"b"}, busy=False) == "b"
    clock.now = 6000
    assert turns.next(waiting, {"b"}, busy=True) is None
