"""The `auto` policy on simulated machines, beside an oracle and the fixed depths."""

from __future__ import annotations

import functools
import itertools
import statistics

import pytest

from omlx_worker.decode.depth.fixed import (
    AutoPolicy,
    make_policy,
)
from tests.simulation import workloads
from tests.simulation.engine import Oracle, Run, simulate
from tests.simulation.scenarios import ARRIVALS, Scenario, scenarios
from tests.simulation.tables import TABLES, WITH_OTHERS

# The constants were tuned on seed 0 alone; on seed 2 they once fell short.
SCENARIOS = scenarios(0, 2)
STEADY = [scenario for scenario in SCENARIOS if scenario.is_endless]


@functools.cache
def run(scenario: Scenario, policy: str) -> Run:
    return scenario.run(policy)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_auto_comes_close_to_an_oracle_and_to_the_better_fixed_depth(scenario: Scenario) -> None:
    speed = run(scenario, "auto").tokens_per_second
    assert speed >= 0.97 * run(scenario, "oracle").tokens_per_second
    assert speed >= 0.98 * run(scenario, "mtp").tokens_per_second
    assert speed >= 0.98 * run(scenario, "batched").tokens_per_second


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(machine, arrivals, seed)
        for machine in WITH_OTHERS
        for seed in (0, 2)
        for arrivals in ARRIVALS
    ],
    ids=str,
)
def test_auto_keeps_up_where_others_use_the_machine_too(scenario: Scenario) -> None:
    speed = run(scenario, "auto").tokens_per_second
    assert speed >= 0.94 * run(scenario, "oracle").tokens_per_second
    share = {"shared": 0.97, "moody": 0.96}[scenario.machine]
    assert speed >= share * run(scenario, "mtp").tokens_per_second
    assert speed >= share * run(scenario, "batched").tokens_per_second


@pytest.mark.parametrize("scenario", STEADY, ids=str)
def test_auto_has_converged_after_200_steps(scenario: Scenario) -> None:
    auto, oracle = run(scenario, "auto"), run(scenario, "oracle")
    window = 400
    for first in range(200, len(auto.steps) - window, window // 4):
        ours = expected_speed(auto, first, first + window)
        assert ours >= 0.97 * expected_speed(oracle, first, first + window), first


@pytest.mark.parametrize("scenario", STEADY, ids=str)
def test_the_typical_step_is_as_good_as_the_oracles_after_200_steps(scenario: Scenario) -> None:
    auto, oracle = run(scenario, "auto"), run(scenario, "oracle")
    # Trials are short: they leave the median of so many steps alone, a wrong depth does not.
    window = 30
    for first in range(200, len(auto.steps) - window, window // 3):
        ours = typical_speed(auto, first, first + window)
        assert ours >= 0.97 * typical_speed(oracle, first, first + window), first


@pytest.mark.parametrize("scenario", STEADY, ids=str)
def test_auto_changes_depth_less_than_once_in_50_steps(scenario: Scenario) -> None:
    depths = [step.depth for step in run(scenario, "auto").steps[200:]]
    changes = sum(a != b for a, b in itertools.pairwise(depths))
    assert changes < len(depths) / 50


def expected_speed(run: Run, first: int, last: int) -> float:
    steps = run.steps[first:last]
    return sum(step.expected for step in steps) / sum(step.seconds for step in steps)


def typical_speed(run: Run, first: int, last: int) -> float:
    return statistics.median(step.expected / step.seconds for step in run.steps[first:last])


def test_auto_holds_out_over_tens_of_thousands_of_steps_and_at_depth_4() -> None:
    jobs, table = workloads.poisson(1000, 6, seed=3), TABLES["cpu"]
    auto = simulate(AutoPolicy(4), table, jobs)
    assert len(auto.steps) >= 20_000
    speed = auto.tokens_per_second
    assert speed >= 0.97 * simulate(Oracle(table, jobs, 4), table, jobs).tokens_per_second
    for mode in ("mtp", "batched"):
        assert speed >= 0.98 * simulate(make_policy(mode, 4), table, jobs).tokens_per_second
    # By now every size of batch has been met, though rows still come and go.
    depths = [step.depth for step in auto.steps[2000:]]
    assert sum(a != b for a, b in itertools.pairwise(depths)) < len(depths) / 50


def test_the_oracle_is_no_slower_than_any_policy() -> None:
    jobs, table = workloads.steady(6, 0), TABLES["apple"]
    best = simulate(Oracle(table, jobs, 3), table, jobs, max_steps=500)
    for mode in ("mtp", "batched"):
        other = simulate(make_policy(mode, 3), table, jobs, max_steps=500)
        assert expected_speed(best, 10, 500) >= 0.999 * expected_speed(other, 10, 500)
