"""How do the depth policies do on simulated machines, beside an oracle that knows the costs?

    python -m scripts.bench.scheduler_sim                          every scenario, a table
    python -m scripts.bench.scheduler_sim --machines apple h200    some
    python -m scripts.bench.scheduler_sim --arrivals "file, 32"    files of requests

The policies are the worker's own. The machines are cost tables (`tests/simulation/tables.py`) with
noise, outliers, compiling steps and the pipeline of the real engine.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from tests.simulation.engine import Run
from tests.simulation.scenarios import ARRIVALS, FILES, MACHINES, MAX_DEPTH, POLICIES, Scenario

Results = dict[Scenario, dict[str, Run]]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    options.add_argument(
        "--arrivals", nargs="+", choices=[*ARRIVALS, *FILES], default=list(ARRIVALS)
    )
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    results = {
        scenario: {policy: scenario.run(policy) for policy in POLICIES}
        for machine in chosen.machines
        for arrivals in chosen.arrivals
        for scenario in [Scenario(machine, arrivals, chosen.seed)]
    }
    show(results)


def show(results: Results) -> None:
    table = Table(
        title=f"tokens per second, at most {MAX_DEPTH} drafts; shares are of auto's tokens/s"
    )
    table.add_column("scenario", no_wrap=True)
    for column in (*POLICIES, "of oracle", "of better fixed", "steps", "changes", "in 50 steps"):
        table.add_column(column, justify="right")
    worst_oracle = worst_fixed = 9.0
    for scenario, runs in results.items():
        speeds = {policy: run.tokens_per_second for policy, run in runs.items()}
        auto = runs["auto"]
        of_oracle = speeds["auto"] / speeds["oracle"]
        of_fixed = speeds["auto"] / max(speeds["mtp"], speeds["batched"])
        worst_oracle, worst_fixed = min(worst_oracle, of_oracle), min(worst_fixed, of_fixed)
        table.add_row(
            str(scenario),
            *(f"{speeds[policy]:.1f}" for policy in POLICIES),
            f"{of_oracle:.3f}",
            f"{of_fixed:.3f}",
            str(len(auto.steps)),
            str(auto.changes),
            f"{50 * auto.changes / len(auto.steps):.2f}",
        )
    console = Console(width=max(Console().width, 150))
    console.print(table)
    console.print(f"auto at its worst: {worst_oracle:.3f} of the oracle, ", end="")
    console.print(f"{worst_fixed:.3f} of the better of mtp and batched")


if __name__ == "__main__":
    main()
