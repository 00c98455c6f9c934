"""Every kind of arrivals on every kind of machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth.policies import DepthPolicy
from omlx_worker.decode.depth_driver import make_policy
from tests.simulation import workloads
from tests.simulation.engine import Oracle, Run, simulate
from tests.simulation.tables import (
    ACCEPTANCE,
    READ,
    TABLES,
    USUAL_READ,
    WITH_OTHERS,
    CostTable,
)
from tests.simulation.workloads import SimulatedJob

MAX_DEPTH = 3
ENDLESS_STEPS = 2500
POLICIES = ("mtp", "batched", "hybrid", "auto", "oracle")
MACHINES = TABLES | WITH_OTHERS

ARRIVALS: dict[str, Callable[[int], list[SimulatedJob]]] = {
    "solo": lambda seed: workloads.solo(20, seed),
    "one row": lambda seed: workloads.steady(1, seed),
    "6 rows": lambda seed: workloads.steady(6, seed),
    "24 rows": lambda seed: workloads.steady(24, seed),
    "bursts": lambda seed: workloads.bursts(5, 12, seed),
    "poisson": lambda seed: workloads.poisson(60, 6, seed),
    "drain": lambda seed: workloads.drains(4, 6, seed),
}

READ_ARRIVALS: dict[str, Callable[[int], list[SimulatedJob]]] = {
    "backlog": lambda seed: workloads.bursts(1, 80, seed, tokens=(40, 300), prompt=(1500, 4500)),
    "flood": lambda seed: workloads.bursts(1, 160, seed, tokens=(20, 80), prompt=(1500, 4500)),
    "trickle": lambda seed: workloads.poisson(60, 4, seed, tokens=(100, 500)),
}
"""Those where prompts are read between steps; in a backlog most of the time, in a flood all
the time."""


FILES = {"file, 1": (1, 40), "file, 8": (8, 200), "file, 32": (32, 400)}
"""Rows at once, and rows, of files of requests."""

WARM_UP = 100
"""What is added to the seed of the file that goes before, so that `auto` knows the machine."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine, and jobs that come to it."""

    machine: str
    arrivals: str
    seed: int = 0

    @property
    def table(self) -> CostTable:
        return MACHINES[self.machine]

    @property
    def jobs(self) -> list[SimulatedJob]:
        if self.arrivals in FILES:
            _, rows = FILES[self.arrivals]
            kind = {"tokens": (32, 160), "prompt": (30, 250)}
            jobs = workloads.bursts(1, rows, self.seed, **kind)
        else:
            jobs = (ARRIVALS | READ_ARRIVALS)[self.arrivals](self.seed)
        if self.arrivals in READ_ARRIVALS:
            share = USUAL_READ / self.read
            jobs = [replace(job, prompt=round(share * job.prompt)) for job in jobs]
        if self.machine == "long" and not self.reads:
            return [replace(job, prompt=30 * job.prompt) for job in jobs]
        if self.machine in ACCEPTANCE:
            rates = workloads.rates(ACCEPTANCE[self.machine])
            return [replace(job, rates=rates) for job in jobs]
        return jobs

    @property
    def is_endless(self) -> bool:
        return "row" in self.arrivals

    @property
    def reads(self) -> bool:
        """Whether prompts are read between steps."""
        return self.arrivals in READ_ARRIVALS or self.arrivals in FILES

    @property
    def read(self) -> float:
        """Seconds to read a prompt token, as a share of a plain step of one row."""
        return READ.get(self.machine, USUAL_READ)

    def run(self, policy: str) -> Run:
        """Run a mode, ``depth 2`` and the like, or the oracle."""
        if policy == "oracle":
            return self.run_with(Oracle(self.table, self.jobs, MAX_DEPTH))
        if policy.startswith("depth "):
            return self.run_with(FixedPolicy(int(policy.removeprefix("depth "))))
        made = make_policy(policy, MAX_DEPTH, MAX_DEPTH)  # type: ignore[arg-type]
        if self.arrivals in FILES:
            replace(self, seed=self.seed + WARM_UP).run_with(made)
        return self.run_with(made)

    def run_with(self, policy: DepthPolicy | Oracle) -> Run:
        return simulate(
            policy,
            self.table,
            self.jobs,
            seed=self.seed,
            max_rows=FILES.get(self.arrivals, (8 if self.reads else 32, 0))[0],
            max_steps=ENDLESS_STEPS if self.is_endless else 10**6,
            read=self.read if self.reads else 0.0,
        )

    def __str__(self) -> str:
        return f"{self.machine}, {self.arrivals}" + (f", seed {self.seed}" if self.seed else "")


def scenarios(*seeds: int) -> list[Scenario]:
    """All machines, each with two kinds of arrivals a seed and one that reads prompts, in turn."""
    made, kinds, reads = [], list(ARRIVALS), list(READ_ARRIVALS)
    for seed in seeds:
        for place, machine in enumerate(MACHINES):
            first = 2 * seed + place
            chosen = (kinds[first % len(kinds)], kinds[(first + 1) % len(kinds)])
            chosen += (reads[(seed + place) % len(reads)],)
            made += [Scenario(machine, arrivals, seed) for arrivals in chosen]
    return made
