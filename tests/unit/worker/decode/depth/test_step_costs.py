"""What steps are taken to cost, from what they took."""

from __future__ import annotations

import itertools

import pytest

from omlx_worker.decode.depth.costs import StepCosts
from omlx_worker.decode.depth.depth_trials import TRIAL


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
    assert costs.estimate((1, 0), 3)[0] == pytest.approx(5.5, rel=0.01)
    assert costs.estimate((1, 0), 3)[3] == pytest.approx(8.0, rel=0.02)


def test_what_slows_one_depth_down_while_in_use_slows_the_others_in_proportion_and_so_back() -> (
    None
):
    costs, cells, noise = StepCosts(), ((1, 0), (1, 1)), itertools.cycle((0.95, 1.02, 1.03))
    for depth, seconds in ((0, 1.0), (3, 4.0)):
        for step in range(80):
            costs.observe(cells[step // 40], depth, next(noise) * seconds)
    for seconds in (6.0, 4.0):
        for step in range(200):  # rows of two lengths take turns
            costs.observe(cells[step // 4 % 2], 3, next(noise) * seconds)
        for cell in cells:
            estimate = costs.estimate(cell, 3)
            assert estimate[3] == pytest.approx(seconds, rel=0.02)
            assert estimate[0] == pytest.approx(seconds / 4, rel=0.06)


def test_a_few_slow_steps_after_a_trial_do_not_make_the_depth_in_use_seem_the_slower_one() -> None:
    costs, noise = StepCosts(), itertools.cycle((0.95, 1.02, 1.03))
    for _ in range(40):
        costs.observe((8, 0), 0, next(noise) * 20.0)
    for _ in range(2 * TRIAL - 1):
        costs.observe((8, 0), 3, next(noise) * 95.0)
    for _ in range(3):
        costs.observe((8, 0), 0, 50.0)
    estimate = costs.estimate((8, 0), 3)
    assert estimate[3] > 3 * estimate[0]


def test_one_step_that_is_far_off_moves_little() -> None:
    costs = StepCosts()
    for _ in range(40):
        costs.observe((8, 0), 0, 20.0)
    for seconds in (400.0, 2.0):
        costs.observe((8, 0), 0, seconds)
        assert costs.estimate((8, 0), 0)[0] == pytest.approx(20.0, rel=0.1)
    assert costs.estimate((8, 0), 0)[0] == pytest.approx(20.0, rel=0.1)


def test_a_depth_looked_at_again_takes_another_time_after_three_steps_that_agree() -> None:
    costs, noise = StepCosts(), itertools.cycle((0.95, 1.02, 1.03))
    for depth in (3, 0):
        for _ in range(40):
            costs.observe((8, 0), depth, next(noise) * 20.0)
    for seconds in (100.0, 102.0, 98.0):
        costs.observe((8, 0), 3, seconds)
    estimate = costs.estimate((8, 0), 3)
    assert estimate[3] == pytest.approx(100.0, rel=0.05)
    assert estimate[0] == pytest.approx(20.0, rel=0.1)


def test_times_of_an_earlier_run_are_soon_outweighed_all_together() -> None:
    costs = StepCosts.from_json([[8, 0, 0, 20.0], [8, 0, 3, 60.0]])
    for _ in range(8):
        costs.observe((8, 0), 0, 30.0)
    estimate = costs.estimate((8, 0), 3)
    assert estimate[0] == pytest.approx(30.0, rel=0.03)
    assert estimate[3] == pytest.approx(90.0, rel=0.06)
