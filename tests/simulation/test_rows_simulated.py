"""How many rows run, and how deep they draft, on machines that others have measured."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from omlx_worker.decode.batch_size import GAIN
from omlx_worker.decode.depth_driver import make_policy
from omlx_worker.engine.rows.interface import FIRST_ROWS
from tests.simulation import workloads
from tests.simulation.engine import NOISE, Run, simulate
from tests.simulation.tables import (
    HEAD_RATES,
    ROWS_STEP,
    USUAL_HEAD_RATES,
    CostTable,
    measured_rows,
)

MAX_DEPTH = 3
STEPS = 2500
MOST = 128
SIZES = (8, 16, 32, 64, 128)
SEEDS = (4, 5, 6)
"""Not those that the sizes' thresholds were tuned on."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """A file of rows on a machine, longer than the simulation."""

    machine: str
    seed: int = SEEDS[0]
    noise: float = NOISE
    rows: int = 3000

    @property
    def table(self) -> CostTable:
        return cliff if self.machine == "cliff" else measured_rows(self.machine)

    @property
    def jobs(self) -> list[workloads.SimulatedJob]:
        rates = HEAD_RATES.get(self.machine, USUAL_HEAD_RATES)
        kind = {"tokens": (60, 400), "prompt": (30, 250)}
        jobs = workloads.bursts(1, self.rows, self.seed, **kind)
        return [replace(job, rates=rates) for job in jobs]

    def speed(self, rows: int, depth: int) -> float:
        """Tokens a second of a batch that is always full."""
        tokens = rows * self.jobs[0].expected(depth)
        return tokens / self.table(rows, depth, 400, 0.0)

    @property
    def best(self) -> tuple[float, int, int]:
        """Tokens a second, rows and drafts of the best fixed choice."""
        choices = itertools.product(SIZES, range(MAX_DEPTH + 1))
        return max((self.speed(*choice), *choice) for choice in choices)

    @property
    def allowed(self) -> float:
        """Tokens a second of the most rows of which each doubling makes `GAIN` more."""
        best = [
            max(self.speed(rows, depth) for depth in range(MAX_DEPTH + 1))
            for rows in SIZES
            if rows >= FIRST_ROWS
        ]
        pays = itertools.takewhile(lambda pair: pair[1] >= (1 + GAIN) * pair[0], pairwise(best))
        return [best[0], *(more for _, more in pays)][-1]

    def run(self, most: int = MOST) -> Run:
        return simulate(
            make_policy("auto", MAX_DEPTH, MAX_DEPTH),
            self.table,
            self.jobs,
            seed=self.seed,
            max_rows=most,
            max_steps=STEPS,
            noise=self.noise,
        )


def cliff(slots: int, depth: int, context: int, clock: float = 0.0) -> float:
    """An M5 Max whose experts have a slower kernel for more than 32 rows."""
    return measured_rows("M5 Max 35B-A3B")(slots, depth, context, clock) * (1 + (slots > 32))


@functools.cache
def ran(backlog: Backlog) -> Run:
    return backlog.run()


def share(backlog: Backlog) -> float:
    """Tokens a second beside the best fixed choice, the steps that found it included."""
    return ran(backlog).tokens_per_second / backlog.best[0]


def usual(run: Run) -> tuple[int, int]:
    """The rows and drafts that most steps of the second half have."""
    half = len(run.sizes) // 2
    rows, depths = Counter(run.sizes[half:]), Counter(step.depth for step in run.steps[half:])
    return rows.most_common(1)[0][0], depths.most_common(1)[0][0]


def settled(run: Run) -> int:
    """The first step at the number of rows that it settles on."""
    return run.sizes.index(usual(run)[0])


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_rows_and_drafts_make_nearly_what_the_best_of_them_do(machine: str) -> None:
    backlogs = [Backlog(machine, seed) for seed in SEEDS]
    assert statistics.fmean(map(share, backlogs)) >= 0.95
    allowed = [ran(backlog).tokens_per_second / backlog.allowed for backlog in backlogs]
    assert statistics.fmean(allowed) >= 0.96


def test_on_average_they_make_97_percent_of_the_most_that_pays() -> None:
    backlogs = [Backlog(machine, seed) for machine in ROWS_STEP for seed in SEEDS]
    shares = [ran(backlog).tokens_per_second / backlog.allowed for backlog in backlogs]
    assert statistics.fmean(shares) >= 0.97


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_times_that_vary_by_a_tenth_cost_a_tenth_more_at_most(machine: str) -> None:
    assert share(Backlog(machine, noise=0.1)) >= 0.85


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_the_rows_are_found_within_three_hundred_steps(machine: str) -> None:
    assert settled(ran(Backlog(machine))) <= 300


def test_fewer_rows_than_a_batch_begins_with_are_nowhere_the_best() -> None:
    assert all(Backlog(machine).best[1] >= FIRST_ROWS for machine in ROWS_STEP)


def test_rows_that_cost_more_than_they_bring_are_left_soon_and_seldom_tried_again() -> None:
    run = ran(Backlog("cliff"))
    assert run.sizes.count(FIRST_ROWS) > 0.9 * len(run.sizes)
    assert share(Backlog("cliff")) >= 0.75


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_a_short_file_never_opens_a_second_tile_for_a_few_rows(machine: str) -> None:
    assert {*Backlog(machine, rows=60).run().sizes} == {FIRST_ROWS}
