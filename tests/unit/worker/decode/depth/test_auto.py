"""The `auto` policy: what it chooses, what it probes, and what makes it change."""

from __future__ import annotations

import itertools

from omlx_worker.decode.depth.auto import INTERVAL, PROBE, AutoPolicy
from tests.unit.worker.decode.depth.feeding import feed, rows

CHEAP, STEEP = (1.0, 1.1, 1.2, 1.3), (1.0, 2.5, 4.0, 5.5)
FLAT_AFTER_A_JUMP = (1.0, 2.3, 2.3, 2.3)
NOISE = (1.0, 0.95, 1.06, 0.97, 1.04, 0.93, 1.02, 20.0, 0.99)


def calibrated(seconds: tuple[float, ...], slots: int = 2, *, in_doubt: bool = False) -> AutoPolicy:
    policy = AutoPolicy(3)
    for depth, cost in enumerate(seconds):
        policy.cells[slots, 0].put(depth, cost, in_doubt=in_doubt)
    return policy


def longest_away_from(depth: int, made: list[int]) -> int:
    """The most steps in a row at other depths."""
    return max(len(list(run)) for same, run in itertools.groupby(made, depth.__eq__) if not same)


def test_without_a_grid_the_best_depth_is_found_within_thirty_steps() -> None:
    for seconds, best in ((CHEAP, 3), (STEEP, 0), (FLAT_AFTER_A_JUMP, 3)):
        assert set(feed(AutoPolicy(3), 50, seconds, [3, 2])[30:]) == {best}


def test_a_depth_that_cannot_win_whatever_it_costs_is_not_measured() -> None:
    assert 3 not in feed(AutoPolicy(3), 40, (1.0, 5.0, 5.0, 5.0), [3, 3])


def test_with_a_grid_the_first_step_is_at_the_best_depth() -> None:
    for seconds, best in ((CHEAP, 3), (STEEP, 0), (FLAT_AFTER_A_JUMP, 3)):
        assert feed(calibrated(seconds), 1, seconds, [3, 2]) == [best]


def test_noise_and_outliers_change_nothing_between_probes() -> None:
    policy = calibrated((1.0, 1.5, 1.9, 2.2))
    made = feed(policy, 2000, (1.0, 1.5, 1.9, 2.2), [3, 3], noise=NOISE)
    assert longest_away_from(3, made) == PROBE
    assert made.count(3) > 0.95 * len(made)


def test_a_machine_whose_costs_change_is_followed() -> None:
    policy = calibrated(CHEAP)
    assert feed(policy, 400, CHEAP, [1, 1])[-1] == 1
    assert set(feed(policy, 3000, STEEP, [1, 1])[-500:]) <= {0, 1, 2, 3}
    assert feed(policy, 500, STEEP, [1, 1]).count(0) > 450


def test_arithmetic_that_slows_down_has_the_other_depths_probed_on_credit() -> None:
    policy = calibrated((20.0, 21.0, 22.0, 23.0), slots=8)
    hot = (20.0, 60.0, 90.0, 120.0)
    assert feed(policy, 200, (20.0, 21.0, 22.0, 23.0), [2] * 8)[-1] == 2
    made = feed(policy, 3 * INTERVAL, hot, [2] * 8)
    assert len(set(made)) == 4, "three others within three intervals, where the savings allow one"


def test_a_depth_that_was_calibrated_in_a_bad_moment_is_soon_timed_again() -> None:
    policy = calibrated((1.0, 1.6, 2.2, 3.6), in_doubt=True)
    made = feed(policy, 6 * INTERVAL, (1.0, 1.6, 2.2, 2.4), [3, 3])
    assert made[0] != 3
    assert set(made[-INTERVAL // 2 :]) == {3}


def test_a_load_that_slows_all_depths_alike_changes_nothing() -> None:
    policy = calibrated(CHEAP)
    feed(policy, 200, CHEAP, [3, 3])
    made = feed(policy, 400, [3 * cost for cost in CHEAP], [3, 3])
    assert longest_away_from(3, made) == PROBE


def test_probes_cost_about_half_a_percent_of_the_time() -> None:
    policy, seconds = calibrated(STEEP), STEEP
    made = feed(policy, 20_000, seconds, [1, 1])
    lost = sum(seconds[k] - (2 + 2 * min(k, 1)) / 2 for k in made)
    lengths = [len(list(run)) for depth, run in itertools.groupby(made) if depth]
    assert 0 < lost < 0.006 * len(made)
    assert set(lengths) == {6}


def test_no_row_drafts_deeper_than_it_may() -> None:
    policy = calibrated(CHEAP)
    assert feed(policy, 1, CHEAP, [3, 3], [1, 0]) == [1]
    assert policy.choose(rows(1, 0), 2).depths == {"row0": 1}


def test_a_limit_between_the_calibrated_depths_is_respected() -> None:
    for own, limit in itertools.product(range(4), range(1, 9)):
        policy = AutoPolicy(8, own)
        for depth in policy.depths:
            policy.cells[1, 0].put(depth, 1.0 + 0.05 * depth)
        assert 0 <= policy.choose(rows(limit), 1).depth <= limit


def test_acceptance_decides_where_costs_do_not() -> None:
    seconds = (1.0, 1.5, 2.0, 2.5)
    assert feed(calibrated(seconds), 300, seconds, [3, 3])[-1] == 3
    assert feed(calibrated(seconds), 300, seconds, [0, 0])[-1] == 0


def test_a_number_of_slots_keeps_its_own_depth() -> None:
    policy = calibrated(CHEAP, slots=1)
    for depth, cost in enumerate(STEEP):
        policy.cells[8, 0].put(depth, cost)
    assert feed(policy, 1, CHEAP, [3]) == [3]
    assert feed(policy, 1, STEEP, [3] * 8) == [0]
    assert feed(policy, 1, CHEAP, [3]) == [3]


def test_nobody_drafts_while_more_rows_join_than_decode() -> None:
    policy = calibrated(CHEAP)
    decision = policy.choose(rows(3, 3), 2, 3)
    assert (decision.depth, decision.passing) == (0, True)
    assert policy.choose(rows(3, 3), 2, 2).depth == 3


def test_nothing_is_probed_while_steps_have_no_time() -> None:
    policy = calibrated((1.0, 1.5, 1.9, 2.2))
    made = feed(policy, 2000, (1.0, 1.5, 1.9, 2.2), [3, 3], timed=False)
    assert set(made) == {3}


def test_rows_that_may_draft_little_count_for_little_at_deeper_depths() -> None:
    seconds = (1.0, 1.2, 1.6, 2.0)
    assert feed(calibrated(seconds, slots=8), 300, seconds, [3] * 8, [3] + [1] * 7)[-1] == 1
