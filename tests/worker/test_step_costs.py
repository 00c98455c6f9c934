"""What steps are taken to cost, from what they took."""

from __future__ import annotations

import pytest

from omlx_worker.costs import StepCosts
from omlx_worker.depth_trials import TRIAL


def test_a_depth_whose_steps_vary_is_not_known_by_the_first_three() -> None:
    costs = StepCosts()
    times = [8.0, 13.6, 10.7, 7.7, 11.9, 13.3, 7.8, 14.7, 11.4, 7.9, 7.7, 8.1]  # as on a GPU
    costs.observe((32, 0), 3, 60.0)  # compiles
    for seconds in times[:3]:
        costs.observe((32, 0), 3, seconds)
    assert not costs.known((32, 0))
    for seconds in times[3:]:
        costs.observe((32, 0), 3, seconds)
    assert costs.known((32, 0)) == {3}
    assert costs.estimate((32, 0), 3)[3] == pytest.approx(sum(times) / len(times), rel=0.1)


def test_a_depth_that_recovers_from_a_bad_start_says_nothing_of_the_others() -> None:
    costs = StepCosts()
    for _ in range(40):
        costs.observe((1, 0), 0, 5.5)
    for seconds in (7.0, 13.0, 13.0, 13.0, *([8.0] * 12)):
        costs.observe((1, 0), 3, seconds)
    assert costs.estimate((1, 0), 3)[0] == pytest.approx(5.5)


def test_what_slows_one_depth_down_while_in_use_is_expected_of_the_others_too() -> None:
    costs, cells = StepCosts(), ((1, 0), (1, 1))
    for depth, seconds in ((3, 1.1), (2, 1.0)):
        for step in range(40):
            costs.observe(cells[step // 20], depth, seconds)
    for step in range(200):  # rows of two lengths take turns, both slower than before
        costs.observe(cells[step // 4 % 2], 2, 1.5)
    for cell in cells:
        estimate = costs.estimate(cell, 3)
        assert estimate[2] == pytest.approx(1.5, abs=0.01)
        assert estimate[3] == pytest.approx(1.6, abs=0.01)


def test_a_depth_that_slows_down_slows_shallower_ones_in_proportion_and_so_back() -> None:
    costs = StepCosts()
    for depth, seconds in ((0, 1.0), (3, 4.0)):
        for _ in range(40):
            costs.observe((1, 0), depth, seconds)
    for _ in range(200):
        costs.observe((1, 0), 3, 6.0)
    assert costs.estimate((1, 0), 3)[0] == pytest.approx(1.5, abs=0.01)
    for _ in range(200):
        costs.observe((1, 0), 3, 4.0)
    assert costs.estimate((1, 0), 3)[0] == pytest.approx(1.0, abs=0.01)


def test_after_a_long_trial_a_few_slow_steps_do_not_replace_what_is_known_of_the_depth_in_use() -> (
    None
):
    costs = StepCosts()
    for _ in range(40):
        costs.observe((8, 0), 0, 20.0)
    for _ in range(2 * TRIAL - 1):
        costs.observe((8, 0), 3, 95.0)
    for _ in range(3):
        costs.observe((8, 0), 0, 50.0)
    assert costs.estimate((8, 0), 0)[0] < 30
