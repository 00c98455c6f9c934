"""Every kind of arrivals on every kind of machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from omlx_worker.decode.depth.fixed import DepthPolicy, make_policy
from tests.simulation import workloads
from tests.simulation.engine import Oracle, Run, simulate
from tests.simulation.tables import CATCH_UP, TABLES, WITH_OTHERS, CostTable
from tests.simulation.workloads import SimulatedJob

MAX_DEPTH = 3
ENDLESS_STEPS = 2500
POLICIES = ("mtp", "batched", "hybrid", "auto", "oracle")

ARRIVALS: dict[str, Callable[[int], list[SimulatedJob]]] = {
    "solo": lambda seed: workloads.solo(20, seed),
    "one row": lambda seed: workloads.steady(1, seed),
    "6 rows": lambda seed: workloads.steady(6, seed),
    "24 rows": lambda seed: workloads.steady(24, seed),
    "bursts": lambda seed: workloads.bursts(5, 12, seed),
    "poisson": lambda seed: workloads.poisson(60, 6, seed),
    "drain": lambda seed: workloads.drains(4, 6, seed),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A machine, and jobs that come to it."""

    machine: str
    arrivals: str
    seed: int = 0

    @property
    def table(self) -> CostTable:
        return (TABLES | WITH_OTHERS)[self.machine]

    @property
    def jobs(self) -> list[SimulatedJob]:
        jobs = ARRIVALS[self.arrivals](self.seed)
        if self.machine == "long":
            return [replace(job, prompt=30 * job.prompt) for job in jobs]
        return jobs

    @property
    def is_endless(self) -> bool:
        return "row" in self.arrivals

    def run(self, policy: str) -> Run:
        jobs = self.jobs
        chosen = (
            Oracle(self.table, jobs, MAX_DEPTH)
            if policy == "oracle"
            else make_policy(policy, MAX_DEPTH)  # type: ignore[arg-type]
        )
        return self.run_with(chosen)

    def run_with(self, policy: DepthPolicy | Oracle) -> Run:
        steps = ENDLESS_STEPS if self.is_endless else 10**6
        return simulate(
            policy,
            self.table,
            self.jobs,
            seed=self.seed,
            max_steps=steps,
            catch_up=CATCH_UP.get(self.machine, 1.0),
        )

    def __str__(self) -> str:
        return f"{self.machine}, {self.arrivals}" + (f", seed {self.seed}" if self.seed else "")


def scenarios(*seeds: int) -> list[Scenario]:
    """All kinds of arrivals on all machines, with each of these seeds."""
    return [
        Scenario(machine, arrivals, seed)
        for seed in seeds
        for machine in TABLES
        for arrivals in ARRIVALS
    ]
