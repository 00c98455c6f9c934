"""How many rows run, and how deep they draft, on machines that others have measured."""

from __future__ import annotations

import functools
import itertools
import statistics
from dataclasses import dataclass, replace

import pytest

from omlx_worker.decode.batch_size import BatchSize
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

LONG = 3000
SHORT = (60, 90, 120, 200, 300)
"""Rows of files that run to their end."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """A file of rows on a machine; by default longer than the simulation."""

    machine: str
    seed: int = SEEDS[0]
    noise: float = NOISE
    rows: int = LONG

    @property
    def table(self) -> CostTable:
        return measured_rows(self.machine)

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

    def run(self, constant: int = 0) -> Run:
        """Run it with as many rows as the worker chooses, or with a constant number."""
        return simulate(
            make_policy("auto", MAX_DEPTH, MAX_DEPTH),
            self.table,
            self.jobs,
            seed=self.seed,
            max_rows=MOST,
            max_steps=STEPS,
            noise=self.noise,
            size=Constant(constant) if constant else None,
        )


class Constant(BatchSize):
    """A number of rows, whatever waits."""

    def __init__(self, rows: int) -> None:
        self._constant = rows
        super().__init__()

    def step(self, joined: int, *, hurried: bool) -> None:
        super().step(joined, hurried=hurried)
        self.rows = self._constant


@functools.cache
def ran(backlog: Backlog, constant: int = 0) -> Run:
    return backlog.run(constant)


def share(backlog: Backlog, constant: int = 0) -> float:
    """Tokens a second beside the best fixed choice."""
    return ran(backlog, constant).tokens_per_second / backlog.best[0]


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_rows_and_drafts_make_nearly_what_the_best_of_them_do(machine: str) -> None:
    assert statistics.fmean(share(Backlog(machine, seed)) for seed in SEEDS) >= 0.98


@pytest.mark.parametrize("constant", [32, 64, 128])
def test_files_of_all_lengths_are_faster_than_with_a_constant(constant: int) -> None:
    files = [Backlog(machine, rows=rows) for machine in ROWS_STEP for rows in (*SHORT, LONG)]
    gains = [share(file) / share(file, constant) for file in files]
    assert statistics.fmean(gains) >= 1.02


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_times_that_vary_by_a_tenth_cost_a_tenth_more_at_most(machine: str) -> None:
    assert share(Backlog(machine, noise=0.1)) >= 0.85


def test_fewer_rows_than_a_batch_begins_with_are_nowhere_the_best() -> None:
    assert all(Backlog(machine).best[1] >= FIRST_ROWS for machine in ROWS_STEP)


@pytest.mark.parametrize("machine", ROWS_STEP)
def test_a_short_file_never_opens_a_second_tile_for_a_few_rows(machine: str) -> None:
    assert {*ran(Backlog(machine, rows=60)).sizes} == {FIRST_ROWS}
