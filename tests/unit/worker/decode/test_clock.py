"""The clock of decode steps: what a step alone took."""

from __future__ import annotations

import itertools

import pytest

from omlx_worker.decode import clock
from omlx_worker.decode.clock import StepClock


@pytest.fixture(autouse=True)
def _a_second_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.time, "monotonic", itertools.count(100.0).__next__)


def test_a_step_takes_the_time_since_the_one_before() -> None:
    steps = StepClock()

    assert [steps.step() for _ in range(3)] == [None, 1.0, 1.0]


@pytest.mark.parametrize(("steps", "times"), [(1, [None, 1.0, 1.0]), (2, [None, None, 1.0])])
def test_steps_after_an_interruption_have_no_time(steps: int, times: list[float | None]) -> None:
    clock = StepClock()
    clock.step()
    clock.interrupt(steps)
    clock.interrupt()

    assert [clock.step() for _ in range(3)] == times
