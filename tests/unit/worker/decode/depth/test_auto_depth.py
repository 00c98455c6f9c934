"""The `auto` policy: what it chooses, what it tries, and what makes it change its mind."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from omlx_worker.decode.depth.auto import HOLD
from omlx_worker.decode.depth.fixed import (
    AutoPolicy,
    Outcome,
    RowView,
    StepReport,
)
from tests.unit.worker.decode.depth.feeding import feed, rows

KEY = "model, device, mlx 0.32.4"


def test_a_row_that_must_not_draft_costs_the_others_nothing() -> None:
    made = feed(AutoPolicy(3), 400, (1.0, 1.0, 1.0, 1.0), {"row0": 3, "row1": 0}, (3, 0))
    assert all("row1" not in depths for depths in made)
    assert made[-1] == {"row0": 3}


def test_a_row_whose_drafts_keep_failing_stops_and_tries_again_ever_more_rarely() -> None:
    made = feed(AutoPolicy(3), 4000, (1.0, 1.01, 1.02, 1.03), {"row0": 3, "row1": 0})
    tried = [index for index, depths in enumerate(made) if "row1" in depths]
    assert 0 < len(tried) < 0.1 * len(made)
    gaps = [b - a for a, b in itertools.pairwise(tried) if b - a > 30]
    assert gaps == sorted(gaps)
    assert len(gaps) >= 4
    assert made[-1]["row0"] == 3


def test_a_row_whose_drafts_begin_to_succeed_is_found_out() -> None:
    policy = AutoPolicy(3)
    feed(policy, 500, (1.0, 1.01, 1.02, 1.03), {"row0": 3, "row1": 0})
    made = feed(policy, 600, (1.0, 1.01, 1.02, 1.03), {"row0": 3, "row1": 3})
    assert made[-1] == {"row0": 3, "row1": 3}


def test_a_machine_that_changes_its_mind_is_followed() -> None:
    policy = AutoPolicy(3)
    accepted = {"row0": 1, "row1": 1}
    assert feed(policy, 400, (1.0, 1.1, 1.2, 1.3), accepted)[-1] == {"row0": 1, "row1": 1}
    made = feed(policy, 4000, (1.0, 2.5, 3.5, 4.5), accepted)
    assert sum(not depths for depths in made[-500:]) > 450


def test_a_depth_that_alone_slows_down_is_found_out() -> None:
    policy = AutoPolicy(3)
    accepted = {"row0": 3, "row1": 3}
    assert feed(policy, 100, (26.0, 58.0, 86.0, 89.0), accepted)[-1] == {"row0": 3, "row1": 3}
    # As where somebody else takes the arithmetic units, which plain steps wait for less.
    assert feed(policy, 200, (26.0, 58.0, 105.0, 130.0), accepted)[-1] == {}


def test_steps_that_come_to_take_another_time_have_other_depths_looked_at_again_soon() -> None:
    policy = AutoPolicy(3)
    accepted = {"row0": 3, "row1": 3}
    settled = feed(policy, 4000, (26.0, 58.0, 76.0, 94.0), accepted)
    assert settled[-1] == {"row0": 3, "row1": 3}
    rarely = sum(a != b for a, b in itertools.pairwise(settled[-800:]))
    assert rarely <= 4, "it is sure of itself by now"
    # Somebody who took the memory has gone and somebody who takes the arithmetic units has come.
    assert feed(policy, 150, (20.0, 70.0, 92.0, 114.0), accepted)[-1] == {}


def test_trials_with_few_slots_do_not_put_off_those_with_many() -> None:
    policy, seconds = AutoPolicy(3), (26.0, 58.0, 105.0, 116.0)
    accepted = {f"row{n}": 3 for n in range(8)}
    assert feed(policy, 100, seconds, accepted, [3] * 8)[-1] == {}
    tried = 0
    for _ in range(6):  # bursts that begin with one row
        feed(policy, 1, (11.0, 12.0, 13.0, 14.0), accepted, [3])
        tried += sum(map(bool, feed(policy, 40, seconds, accepted, [3] * 8)))
    assert tried


def test_a_depth_measured_at_a_bad_moment_is_measured_again() -> None:
    policy = AutoPolicy(3)
    accepted = {"row0": 2, "row1": 2}
    feed(policy, 40, (1.0, 1.1, 9.0, 9.5), accepted)
    made = feed(policy, 10_000, (1.0, 1.1, 1.2, 1.3), accepted)
    assert sum(depths == {"row0": 2, "row1": 2} for depths in made[-500:]) > 450


def alone_and_fast_with(seconds: Sequence[float]) -> AutoPolicy:
    policy = AutoPolicy(3)
    assert feed(policy, 300, seconds, {"row0": 3}, [3])[-1] == {"row0": 3}
    return policy


def test_rows_that_wait_for_a_step_to_pass_wait_for_the_one_that_costs_all_least() -> None:
    policy = alone_and_fast_with((1.0, 1.2, 1.4, 1.6))
    changes = policy.transitions
    for coming in range(7, 0, -1):
        decision = policy.choose(rows(3), 1, coming)
        assert (decision.depth, decision.passing) == (0, True)
    assert policy.choose(rows(3), 1).depth == 3, "the knowledge of before is still there"
    assert policy.transitions == changes


def test_between_two_joins_nobody_drafts_deeper_than_when_a_row_joined() -> None:
    policy = alone_and_fast_with((1.0, 1.2, 1.4, 1.6))
    assert policy.choose(rows(3), 1, 7, reading=True).depth == 0
    decisions = [policy.choose(rows(3), 1, reading=True) for _ in range(HOLD + 1)]
    assert [decision.depth for decision in decisions] == [0] * (HOLD - 1) + [3, 3]
    assert policy.choose(rows(3), 1, 7, reading=True).depth == 0
    assert policy.choose(rows(3), 1).depth == 3, "nothing is being read any more"


def test_every_size_of_batch_keeps_its_own_depth() -> None:
    policy = AutoPolicy(3)
    many = {f"row{n}": 3 for n in range(8)}
    few, alone = (1.0, 3.0, 5.0, 7.0), (1.0, 1.1, 1.2, 1.3)
    feed(policy, 400, few, dict.fromkeys(many, 0), [3] * 8)
    assert feed(policy, 400, alone, {"row0": 3}, [3])[-1] == {"row0": 3}
    views = [RowView(name, 3, 100) for name in many]
    assert policy.choose(views).depth == 0
    assert policy.choose(rows(3)).depth == 3


def test_after_a_restart_a_size_of_batch_begins_with_what_was_best_not_with_another_sizes_depth(
    tmp_path: Path,
) -> None:
    before, after = AutoPolicy(3), AutoPolicy(3)
    many = {f"row{n}": 3 for n in range(8)}
    feed(before, 400, (1.0, 1.1, 1.2, 1.3), {"row0": 3}, [3])
    feed(before, 400, (1.0, 3.0, 5.0, 7.0), many, [3] * 8)
    before.save(tmp_path / "known.json", KEY)

    assert after.load(tmp_path / "known.json", KEY)

    assert after.choose(rows(3)).depth == 3
    decision = after.choose([RowView(name, 3, 100) for name in many])
    assert (decision.depth, decision.reason) == (0, "depth 0: the best when last measured")


def test_a_depth_that_seems_slower_than_its_neighbours_make_expect_is_measured_once_more() -> None:
    policy, accepted = AutoPolicy(3), {"row0": 3}
    # The worker had just started: three drafts met with a bad moment.
    assert feed(policy, 40, (17.0, 28.0, 28.0, 51.0), accepted, [3])[-1] == {"row0": 2}
    made = feed(policy, 100, (10.0, 17.0, 21.0, 24.0), accepted, [3])
    assert made[-1] == {"row0": 3}


def test_a_depth_that_is_out_of_line_for_good_is_measured_twice_more_at_most() -> None:
    policy, accepted = AutoPolicy(3), {"row0": 3}
    made = feed(policy, 1500, (10.0, 12.0, 14.0, 40.0), accepted, [3])
    tried = [
        len(list(run))
        for depth, run in itertools.groupby(len(d) and d["row0"] for d in made)
        if depth == 3
    ]
    assert len(tried) <= 4


def test_what_an_earlier_run_measured_in_a_bad_moment_is_not_believed_for_long(
    tmp_path: Path,
) -> None:
    before, after, accepted = AutoPolicy(3), AutoPolicy(3), {"row0": 3}
    assert feed(before, 300, (10.0, 13.0, 22.0, 29.0), accepted, [3])[-1] == {"row0": 1}
    before.save(tmp_path / "known.json", KEY)
    assert after.load(tmp_path / "known.json", KEY)

    made = feed(after, 150, (10.0, 13.0, 18.0, 21.0), accepted, [3])

    assert made[0] == {"row0": 1}
    assert made[-1] == {"row0": 3}


def test_drafts_that_cost_next_to_nothing_are_made_while_rows_wait_as_well() -> None:
    policy = alone_and_fast_with((1.0, 1.01, 1.02, 1.03))
    assert policy.choose(rows(3), 1, 7).depth == 3


def test_drafts_that_do_not_pay_for_all_rows_are_not_made_while_they_join() -> None:
    policy = alone_and_fast_with((1.0, 1.01, 1.02, 1.03))
    accepted = {f"row{n}": 3 for n in range(8)}
    assert feed(policy, 300, (1.0, 5.0, 7.0, 9.0), accepted, [3] * 8)[-1] == {}
    assert policy.choose(rows(3), 1, 7).depth == 0


@pytest.mark.parametrize(("turns", "learnt"), [(False, 1), (True, 0)])
def test_a_step_during_which_the_head_may_have_caught_up_says_nothing_of_its_depth(
    turns: bool, learnt: int, tmp_path: Path
) -> None:
    policy = AutoPolicy(3)
    for _ in range(20):
        policy.choose(rows(3), 1)
        policy.observe(StepReport(1.0, 1, 0, 100, [Outcome("row0", 0, 0)], 0, turns=turns))
    policy.save(tmp_path / "known.json", KEY)
    assert len(json.loads((tmp_path / "known.json").read_text())["costs"]) == learnt


def test_no_depth_is_tried_while_prompts_are_read_between_the_steps() -> None:
    policy, rows = AutoPolicy(3), [RowView("row0", 3, 100)]
    tried = []
    for step in range(400):
        timed = step >= 200
        decision = policy.choose(rows)
        tried.append(decision.passing)
        outcome = Outcome("row0", decision.depth, 0)
        seconds = 1.0 if timed else None
        policy.observe(StepReport(seconds, 1, decision.depth, 100, [outcome]))
    assert not any(tried[10:200]), "one trial may have been going on"
    assert any(tried[200:])


def test_what_the_head_catches_up_with_is_in_the_price_of_trials() -> None:
    policy, seconds, catch_up = AutoPolicy(3), (1.0, 2.5, 5.0, 7.5), 5.0
    accepted = {"row0": 3, "row1": 3}
    feed(policy, 2000, seconds, accepted, catch_up=catch_up)
    made = [
        max(depths.values(), default=0)
        for depths in feed(policy, 40_000, seconds, accepted, catch_up=catch_up)
    ]
    returns = sum(b > 0 and not a for a, b in itertools.pairwise(made))
    lost = sum(seconds[k] - (k + 1) * seconds[0] for k in made) + returns * catch_up
    assert returns
    assert lost < 0.008 * len(made)


def test_trials_of_slow_depths_cost_little_time() -> None:
    policy, seconds = AutoPolicy(3), (1.0, 6.0, 12.0, 18.0)
    accepted = {"row0": 3, "row1": 3}
    feed(policy, 200, seconds, accepted)
    made = feed(policy, 10_000, seconds, accepted)
    spent = sum(seconds[max(depths.values(), default=0)] for depths in made)
    assert any(made)
    assert spent < 1.01 * len(made)


def test_compiling_does_not_fool_the_policy() -> None:
    policy = AutoPolicy(1)
    pending, compiled = 0, set()
    for _ in range(100):
        decision = policy.choose(rows(1))
        seconds = 1.0 if pending in compiled else 60.0
        compiled.add(pending)
        outcome = Outcome("row0", pending, pending)
        policy.observe(StepReport(seconds, 1, pending, 100, [outcome], decision.depth))
        pending = decision.depth
    assert pending == 1


def test_a_trial_outlasts_the_steps_that_it_makes_slow_itself() -> None:
    policy, rows = AutoPolicy(3), [RowView("row0", 3, 100)]
    met: set[int] = set()
    verified = 0
    for _ in range(200):
        depth = policy.choose(rows).depth
        traced = depth not in met
        met.add(depth)
        outcome = Outcome("row0", verified, 0)
        seconds = None if traced else 1.0 + verified
        policy.observe(StepReport(seconds, 1, verified, 100, [outcome], depth))
        verified = depth
    assert {0, 1} <= met
    assert policy.choose(rows).depth == 0


def test_a_depth_that_was_left_in_a_bad_moment_is_soon_in_use_again() -> None:
    policy, accepted = AutoPolicy(3), {"row0": 1, "row1": 1}
    usual, bad = (20.0, 48.0, 75.0, 95.0), (50.0, 60.0, 76.0, 96.0)
    assert feed(policy, 3000, usual, accepted)[-1] == {}
    assert feed(policy, 60, bad, accepted)[-1] == {"row0": 1, "row1": 1}
    assert feed(policy, 200, usual, accepted)[-1] == {}


def test_a_few_steps_while_rows_join_do_not_pass_for_a_look_at_the_depth_that_was_left() -> None:
    policy, accepted = AutoPolicy(3), {"row0": 1, "row1": 1}
    usual, bad = (22.0, 48.0, 75.0, 95.0), (50.0, 48.0, 75.0, 95.0)
    assert feed(policy, 3000, usual, accepted)[-1] == {}
    assert feed(policy, 90, bad, accepted)[-1] == {"row0": 1, "row1": 1}
    made = []
    for _ in range(10):
        policy.choose(rows(3, 3), coming=6)
        policy.observe(StepReport(28.0, 2, 0, 100, [], 0))
        made += feed(policy, 30, usual, accepted)
    assert {} in made
