"""The `auto` policy on simulated machines, beside an oracle and the fixed depths."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from omlx_worker.decode.depth import acceptance, auto
from omlx_worker.decode.depth.step_times import StepTimes, cell_of
from omlx_worker.decode.depth_driver import make_policy
from omlx_worker.engine.rows.interface import FIRST_ROWS
from tests.simulation import workloads
from tests.simulation.engine import Run, simulate
from tests.simulation.scenarios import ENDLESS_STEPS, FILES, MAX_DEPTH, Scenario, scenarios
from tests.simulation.tables import TABLES, CostTable, apple, cold, crossing, h200, jump
from tests.simulation.workloads import SimulatedJob

SEEDS = (4, 5)
"""Not those that the policy was tuned on, which are 0 to 3."""

ALL = scenarios(*SEEDS)
STEPS_ALONE = [scenario for scenario in ALL if not scenario.reads]
WITH_PROMPTS = [scenario for scenario in ALL if scenario.reads]
FARTHEST = 0.72
"""Share of the oracle on the worst machine: heat comes and goes while batches of every size do."""


@functools.cache
def speed(scenario: Scenario, policy: str) -> float:
    run: Run = scenario.run(policy)
    return run.tokens_per_second


def of_oracle(scenario: Scenario) -> float:
    return speed(scenario, "auto") / speed(scenario, "oracle")


def test_auto_is_close_to_an_oracle_on_average() -> None:
    assert statistics.fmean(map(of_oracle, STEPS_ALONE)) >= 0.96


@pytest.mark.parametrize("scenario", STEPS_ALONE, ids=str)
def test_auto_is_never_far_from_an_oracle(scenario: Scenario) -> None:
    assert of_oracle(scenario) >= FARTHEST


def test_auto_is_as_good_as_the_better_fixed_mode_on_average() -> None:
    shares = [
        speed(scenario, "auto") / max(speed(scenario, "mtp"), speed(scenario, "batched"))
        for scenario in STEPS_ALONE
    ]
    assert statistics.fmean(shares) >= 0.98


@pytest.mark.parametrize("scenario", WITH_PROMPTS, ids=str)
def test_auto_keeps_up_with_the_best_depth_where_prompts_are_read(scenario: Scenario) -> None:
    best = max(speed(scenario, f"depth {depth}") for depth in range(MAX_DEPTH + 1))
    assert speed(scenario, "auto") >= 0.85 * best


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_as_fast_as_with_the_better_fixed_mode(file: str) -> None:
    shares = []
    for machine, seed in itertools.product(TABLES, SEEDS):
        scenario = Scenario(machine, file, seed)
        better = max(speed(scenario, "mtp"), speed(scenario, "batched"))
        shares.append(speed(scenario, "auto") / better)
    assert min(shares) >= 0.95
    assert statistics.fmean(shares) >= 0.985


def test_the_oracle_is_no_slower_than_any_mode() -> None:
    steady = Scenario("apple", "6 rows", SEEDS[0])
    for mode in ("mtp", "batched", "auto"):
        assert speed(steady, "oracle") >= 0.995 * speed(steady, mode)


def run_all(
    table: CostTable, jobs: Callable[[int], Sequence[SimulatedJob]], *, max_rows: int = FIRST_ROWS
) -> list[Run]:
    """Runs of `auto`, one a seed."""
    return [
        simulate(
            make_policy("auto", MAX_DEPTH, MAX_DEPTH),
            table,
            jobs(seed),
            seed=seed,
            max_rows=max_rows,
            max_steps=2 * ENDLESS_STEPS,
        )
        for seed in SEEDS
    ]


def tokens_per_second(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.tokens_per_second for run in runs)


def test_probes_find_out_that_a_depth_is_no_longer_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    probing = run_all(cold, lambda seed: workloads.steady(24, seed))
    monkeypatch.setattr(auto, "INTERVAL", 10**9)
    without = run_all(cold, lambda seed: workloads.steady(24, seed))
    assert tokens_per_second(probing) >= 1.1 * tokens_per_second(without)


def long_and_short(seed: int) -> list[SimulatedJob]:
    """Rows with long and with short caches by turns, one after another."""
    rng, made = random.Random(seed), []
    for number in range(24):
        prompt = (12_000, 18_000) if number % 2 else (50, 400)
        kind = {"tokens": (100, 300), "prompt": prompt}
        made.append(workloads.job(f"{number}", number * 1e6, rng, rate=(0.6, 0.8), **kind))
    return made


def test_times_by_context_pay_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run_all(crossing, long_and_short)
    monkeypatch.setattr(auto, "cell_of", lambda slots, _: cell_of(slots, 0))
    assert tokens_per_second(told) >= 1.04 * tokens_per_second(run_all(crossing, long_and_short))


def changed_content(seed: int) -> list[SimulatedJob]:
    """Rows whose drafts are nearly all accepted; once they have ended, rows with few that are."""
    kind = {"tokens": (200, 400), "prompt": (50, 200)}
    easy = workloads.bursts(1, 64, seed, **kind)
    hard = workloads.bursts(1, 96, seed + 1, **kind)
    return [
        *(replace(job, rates=workloads.rates(0.95)) for job in easy),
        *(
            replace(job, row_id=f"hard {job.row_id}", arrival=1e7, rates=workloads.rates(0.2))
            for job in hard
        ),
    ]


def test_counts_that_fade_pay_where_the_content_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    fading = run_all(apple, changed_content, max_rows=8)
    monkeypatch.setattr(acceptance, "MEMORY", 10**9)
    without = run_all(apple, changed_content, max_rows=8)
    assert tokens_per_second(fading) >= 1.05 * tokens_per_second(without)


def test_a_new_size_that_begins_like_the_nearest_meets_fewer_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shapes() -> int:
        bursts = functools.partial(workloads.bursts, 5, 12)
        runs = [run for table in (apple, h200, jump) for run in run_all(table, bursts)]
        return sum(
            len({((step.rows - 1).bit_length(), step.depth) for step in run.steps}) for run in runs
        )

    met = shapes()
    monkeypatch.setattr(StepTimes, "_nearest", lambda times, cell: times._known.get(cell, {}))
    assert met <= 0.85 * shapes()
