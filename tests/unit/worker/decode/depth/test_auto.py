"""The `auto` policy: what it chooses, what it probes, and what makes it change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from omlx_worker.decode.depth.auto import AutoPolicy
from tests.unit.worker.decode.depth.feeding import feed, rows

CHEAP, STEEP = (1.0, 1.1, 1.2, 1.3), (1.0, 2.5, 4.0, 5.5)
FLAT_AFTER_A_JUMP = (1.0, 2.3, 2.3, 2.3)
NOISE = (1.0, 0.95, 1.06, 0.97, 1.04, 0.93, 1.02, 20.0, 0.99)


def settled(seconds: Sequence[float], accepted: Sequence[int] = (3, 3)) -> AutoPolicy:
    """A policy that has met this many rows, and these times, before."""
    policy = AutoPolicy(3, 3)
    feed(policy, 300, seconds, accepted)
    return policy


def longest_away_from(depth: int, made: list[int]) -> int:
    """The most steps in a row at other depths."""
    runs = itertools.groupby(made, depth.__eq__)
    return max((len(list(run)) for same, run in runs if not same), default=0)


@pytest.mark.parametrize(
    ("seconds", "best"), [(CHEAP, 3), (STEEP, 0), (FLAT_AFTER_A_JUMP, 3)], ids=str
)
def test_the_best_depth_is_found_within_forty_steps(seconds: Sequence[float], best: int) -> None:
    assert feed(AutoPolicy(3, 3), 100, seconds, [3, 2])[40:].count(best) > 50


def test_noise_and_outliers_change_nothing_between_probes() -> None:
    seconds = (1.0, 1.5, 1.9, 2.2)
    made = feed(settled(seconds), 2000, seconds, [3, 3], noise=NOISE)
    assert longest_away_from(3, made) < 10
    assert made.count(3) > 0.9 * len(made)


def test_a_machine_whose_costs_change_is_followed() -> None:
    policy = settled(CHEAP)
    feed(policy, 3000, STEEP, [1, 1])
    assert feed(policy, 500, STEEP, [1, 1]).count(0) > 450


def test_arithmetic_that_slows_down_is_followed() -> None:
    policy, hot = settled((20.0, 21.0, 22.0, 23.0), [2] * 8), (20.0, 60.0, 90.0, 120.0)
    assert feed(policy, 300, hot, [2] * 8)[-1] == 0


def test_a_load_that_slows_all_depths_alike_changes_nothing() -> None:
    made = feed(settled(CHEAP), 400, [3 * cost for cost in CHEAP], [3, 3])
    assert longest_away_from(3, made) < 10


def test_probes_cost_less_than_a_percent_of_the_time() -> None:
    policy, seconds = settled(STEEP, [1, 1]), STEEP
    made = feed(policy, 20_000, seconds, [1, 1])
    lost = sum(seconds[k] - (2 + 2 * min(k, 1)) / 2 for k in made)
    assert 0 < lost < 0.01 * len(made)


def test_what_deeper_drafts_came_to_is_not_forgotten_while_none_are_made() -> None:
    seconds = (1.0, 1.2, 1.6, 2.0)
    policy = settled(seconds, [1, 1])
    assert feed(policy, 4000, seconds, [1, 1]).count(1) > 3950


def test_a_depth_that_accepts_no_more_than_a_shallower_one_is_not_probed() -> None:
    seconds = (1.0, 1.1, 1.2, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3)
    policy = AutoPolicy(8, 3)
    feed(policy, 300, seconds, [2, 2], [8, 8], own=3)
    assert max(feed(policy, 2000, seconds, [2, 2], [8, 8], own=3)) <= 3


def test_no_row_drafts_deeper_than_it_may() -> None:
    policy = settled(CHEAP)
    assert feed(policy, 1, CHEAP, [3, 3], [1, 0]) == [1]
    assert policy.choose(rows(1, 0), 2)[0] <= 1


@pytest.mark.parametrize(("own", "limit"), list(itertools.product(range(4), range(1, 9))))
def test_a_limit_between_the_depths_that_are_tried_is_respected(own: int, limit: int) -> None:
    policy = AutoPolicy(8, own)
    seconds = [1.0 + 0.05 * depth for depth in range(9)]
    made = feed(policy, 100, seconds, [8], [limit], own=own)
    assert max(made) <= limit


def test_acceptance_decides_where_costs_do_not() -> None:
    seconds = (1.0, 1.5, 2.0, 2.5)
    assert feed(AutoPolicy(3, 3), 300, seconds, [3, 3])[-1] == 3
    assert feed(AutoPolicy(3, 3), 300, seconds, [0, 0])[-1] == 0


def test_a_number_of_slots_keeps_its_own_depth() -> None:
    policy = AutoPolicy(3, 3)
    feed(policy, 300, CHEAP, [3])
    feed(policy, 300, STEEP, [3] * 8)
    assert feed(policy, 30, CHEAP, [3]).count(3) > 20
    assert feed(policy, 30, STEEP, [3] * 8).count(0) > 20
    assert feed(policy, 30, CHEAP, [3]).count(3) > 20


def test_a_number_of_slots_that_is_new_begins_at_the_depth_of_the_nearest() -> None:
    policy = AutoPolicy(3, 3)
    feed(policy, 300, CHEAP, [3, 3])
    assert feed(policy, 1, CHEAP, [3] * 4) == [3]


def test_nothing_is_probed_while_steps_have_no_time() -> None:
    made = feed(settled(CHEAP), 2000, CHEAP, [3, 3], timed=False)
    assert set(made[1:]) == {3}


def test_rows_that_may_draft_little_count_for_little_at_deeper_depths() -> None:
    seconds = (1.0, 1.2, 1.6, 2.0)
    made = feed(AutoPolicy(3, 3), 300, seconds, [3] * 8, [3] + [1] * 7)
    assert made[-1] == 1
