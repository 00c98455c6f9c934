"""The picture of `scheduler_sim.py`: tokens per second by rows, and one run over time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

from omlx_worker.decode.depth.fixed import make_policy
from tests.simulation.engine import Oracle, Run, simulate
from tests.simulation.tables import TABLES
from tests.simulation.workloads import SimulatedJob, job

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

MAX_DEPTH = 3
ROWS = (1, 2, 4, 8, 16, 32)
STEPS = 1200
TITLES = {
    "apple": "Apple M3 Max\nstaircase, 27B in 4 bits",
    "h200": "H200\nmeasured, 4B in bfloat16",
    "cpu": "CPU\na line: drafts cost like tokens",
    "long": "Long contexts\nreading the cache costs most",
}
STYLES = {
    "mtp": ("#d1495b", "--", 1.6, "s"),
    "batched": ("#8d99ae", "--", 1.6, "o"),
    "oracle": ("#edae49", "-", 6.0, ""),
    "auto": ("#00798c", "-", 2.0, "D"),
}


def plot(path: Path, seed: int) -> None:
    """Write the picture."""
    plt.rcParams.update({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 7.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    panels = top.subplots(1, len(TITLES), sharey=True)
    for axes, machine in zip(panels, TITLES, strict=True):
        _by_rows(axes, machine, seed)
    panels[0].set_ylim(0)
    panels[0].set_ylabel("tokens/s, batched = 1")
    handles, labels = panels[0].get_legend_handles_labels()
    top.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    top.suptitle("Steady batches: what each mode reaches", weight="bold")
    _over_time(bottom.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.5)), seed)
    bottom.suptitle("One run on the M3 Max table, nothing known at first", weight="bold")
    figure.savefig(path, dpi=130)


def _jobs(machine: str, rows: int, seed: int) -> list[SimulatedJob]:
    rng = random.Random(seed)
    jobs = [job(f"row{n}", 0, rng, tokens=(10**7, 10**7), rate=(0.55, 0.95)) for n in range(rows)]
    return [replace(one, prompt=30 * one.prompt) if machine == "long" else one for one in jobs]


def _run(policy: str, machine: str, jobs: list[SimulatedJob], steps: int = STEPS) -> Run:
    table = TABLES[machine]
    if policy == "oracle":
        return simulate(Oracle(table, jobs, MAX_DEPTH), table, jobs, max_steps=steps)
    chosen = make_policy(policy, MAX_DEPTH)  # type: ignore[arg-type]
    return simulate(chosen, table, jobs, max_steps=steps)


def _by_rows(axes: Axes, machine: str, seed: int) -> None:
    speeds: dict[str, list[float]] = {policy: [] for policy in STYLES}
    for rows in ROWS:
        jobs = _jobs(machine, rows, seed)
        plain = _speed(_run("batched", machine, jobs))
        for policy in STYLES:
            speeds[policy].append(_speed(_run(policy, machine, jobs)) / plain)
    for policy, values in speeds.items():
        colour, line, width, marker = STYLES[policy]
        axes.plot(ROWS, values, line, color=colour, lw=width, marker=marker, ms=4.5, label=policy)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.set_title(TITLES[machine], fontsize=9.5)
    axes.set_xlabel("rows")
    axes.grid(alpha=0.25)


def _over_time(panels: list[Axes], seed: int) -> None:
    """One row, then 12 more that end one by one, then the first alone again."""
    rng = random.Random(seed)
    jobs = [job("first", 0, rng, tokens=(3600, 3600), rate=(0.85, 0.85))]
    jobs += [job(f"guest{n}", 1000, rng, tokens=(150, 900)) for n in range(12)]
    runs = {policy: _run(policy, "apple", jobs, 10**6) for policy in STYLES}
    rows, depth, speed = panels
    for policy in ("oracle", "auto"):
        colour, _, width, _ = STYLES[policy]
        clock = _clock(runs[policy])
        depths = [step.depth for step in runs[policy].steps]
        depth.step(clock, depths, where="post", color=colour, lw=width, label=policy)
    rows.step(
        _clock(runs["auto"]), [s.rows for s in runs["auto"].steps], where="post", color="#333333"
    )
    for policy, run in runs.items():
        colour, line, width, _ = STYLES[policy]
        clock = _clock(run)
        speed.plot(clock, _rolling(run, 40), line, color=colour, lw=width, label=policy)
    rows.set_ylabel("rows")
    depth.set_ylabel("draft depth")
    depth.set_yticks(range(MAX_DEPTH + 1))
    depth.set_ylim(-0.3, MAX_DEPTH + 0.3)
    speed.set_ylabel("tokens/s, 40 steps")
    speed.set_ylim(0)
    speed.set_xlabel("tokens generated")
    for axes in panels:
        axes.grid(alpha=0.25)
        axes.margins(x=0.01)


def _clock(run: Run) -> list[int]:
    """Tokens generated before each step: on that clock all policies see the same batch."""
    clock, total = [], 0
    for step in run.steps:
        clock.append(total)
        total += step.tokens
    return clock


def _rolling(run: Run, steps: int) -> list[float]:
    values = []
    for end in range(1, len(run.steps) + 1):
        window = run.steps[max(0, end - steps) : end]
        values.append(sum(s.expected for s in window) / sum(s.seconds for s in window))
    return values


def _speed(run: Run) -> float:
    """After the first 200 steps, so that all are compared with what they know settled."""
    steps = run.steps[200:]
    return sum(step.expected for step in steps) / sum(step.seconds for step in steps)
