"""The clock of decode steps: what a step took, and whether that was a step alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from omlx_worker.decode import clock
from omlx_worker.decode.clock import StepClock


@pytest.fixture(autouse=True)
def _a_second_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.time, "monotonic", itertools.count(100.0).__next__)


def test_a_step_takes_the_time_since_the_one_before() -> None:
    steps = StepClock()

    assert [steps.step() for _ in range(3)] == [(None, False), (1.0, True), (1.0, True)]


def test_a_step_after_an_interruption_has_no_time() -> None:
    steps = StepClock()
    steps.step()
    steps.interrupt()

    assert [steps.step() for _ in range(2)] == [(None, False), (1.0, True)]


@pytest.mark.parametrize(
    ("event", "alone"),
    [(StepClock.chunk, [False, True, True]), (StepClock.traced, [False, False, True])],
)
def test_the_time_of_a_chunk_or_a_trace_is_not_a_steps_alone(
    event: Callable[[StepClock], None], alone: list[bool]
) -> None:
    steps = StepClock()
    steps.step()
    event(steps)

    assert [steps.step() for _ in range(3)] == [(1.0, each) for each in alone]
