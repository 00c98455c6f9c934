"""The table of a pipeline benchmark, for a terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.terminal import counted

Figures = dict[str, Any]

BASE, WORKER, SLOW, STOCK = "in process", "worker", "one slow", "stock RQ"

MEANING = {
    BASE: "the engine under the worker's scheduler in the benchmark's process, in one thread",
    WORKER: "the worker's process, Redis, and a client a job that follows its tokens",
    SLOW: "the same with one of the consumers slow; times are those of the others",
    STOCK: "rq.SimpleWorker running mlx-lm's generate_step, a job at a time, no streaming",
    "tokens_per_second": "of all jobs, from the first submit to the end of the last",
    "first": "seconds to a job's first token, the median over jobs",
    "gap_p50, gap_p99": "seconds between two arrivals of tokens of one job, over all jobs",
    "cpu": "seconds that each process computed during the lap",
}

NOTE = (
    "Medians over {laps} laps, with their ranges; ratios are taken within each lap. The worker and "
    "the engine in process follow the worker's scheduler. "
    "{sharing}"
)
COMPUTES = "The worker, Redis and the clients share {cores} cores with the engine's computation."
SLEEPS = (
    "The engine only sleeps, as the processor does while a GPU computes, so this is the path "
    "alone; the worker, Redis and the clients share {cores} cores."
)


@dataclass(frozen=True)
class Line:
    """One figure of a lap, and its goal.

    Attributes:
        sides: those that the lap must have.
    """

    name: str
    of: Callable[[Figures], float]
    form: str
    sides: tuple[str, ...] = (BASE, WORKER)
    goal: str = ""

    def cell(self, laps: Sequence[Figures]) -> str:
        """The median and, on a second line, the range; empty where nothing was measured."""
        values = [self.of(lap) for lap in laps if all(side in lap for side in self.sides)]
        if not values:
            return ""
        middle = f"{statistics.median(values):{self.form}}"
        if len(values) == 1:
            return middle
        return f"{middle}\n{min(values):{self.form}}..{max(values):{self.form}}"


def _speed(name: str) -> Line:
    return Line(f"{name}, tokens/s", lambda lap: lap[name]["tokens_per_second"], ".0f", (name,))


def _over(other: str, form: str, goal: str = "") -> Line:
    return Line(
        f"worker / {other}",
        lambda lap: lap[WORKER]["tokens_per_second"] / lap[other]["tokens_per_second"],
        form,
        (WORKER, other),
        goal,
    )


LINES = (
    _speed(BASE),
    _speed(WORKER),
    _speed(STOCK),
    _over(BASE, ".3f", ">= 0.97 at 32"),
    _over(STOCK, ".1f"),
    Line(
        f"{SLOW} / none slow",
        lambda lap: lap[SLOW]["tokens_per_second"] / lap[WORKER]["tokens_per_second"],
        ".3f",
        (SLOW, WORKER),
        "1, noise aside",
    ),
    Line(
        "processor s, worker / in process",
        lambda lap: lap[WORKER]["cpu"].get("worker", math.nan) / lap[BASE]["cpu"]["engine"],
        ".2f",
    ),
    Line("first token, in process, ms", lambda lap: 1000 * lap[BASE]["first"], ".0f"),
    Line(
        "added to first token, ms",
        lambda lap: 1000 * (lap[WORKER]["first"] - lap[BASE]["first"]),
        "+.1f",
        goal="< 10",
    ),
    Line("gap p99, in process, ms", lambda lap: 1000 * lap[BASE]["gap_p99"], ".1f"),
    Line(
        "worker's gap p50 / that", lambda lap: lap[WORKER]["gap_p50"] / lap[BASE]["gap_p99"], ".2f"
    ),
    Line(
        "worker's gap p99 / that",
        lambda lap: lap[WORKER]["gap_p99"] / lap[BASE]["gap_p99"],
        ".2f",
        goal="<= 1.5",
    ),
)


def _points(results: Figures) -> list[Figures]:
    measured = [point for point in results["points"] if point["laps"]]
    return sorted(measured, key=lambda point: point["jobs"])


def _head(results: Figures) -> list[str]:
    return ["jobs at once", *(str(point["jobs"]) for point in _points(results)), "goal"]


def _rows(results: Figures) -> list[list[str]]:
    rows = []
    for line in LINES:
        cells = [line.cell(point["laps"]) for point in _points(results)]
        if any(cells):
            rows.append([line.name, *cells, line.goal])
    return rows


def _note(results: Figures) -> str:
    laps = max((len(point["laps"]) for point in results["points"]), default=0)
    sharing = (SLEEPS if results["step"] else COMPUTES).format(cores=results["cores"])
    return NOTE.format(laps=laps, sharing=sharing)


def _processor_time(results: Figures) -> list[str]:
    """The share of CPU time of each process, for each number of jobs."""
    found = []
    for point in _points(results):
        laps = [lap[WORKER]["cpu"] for lap in point["laps"]]
        total = sum(sum(cpu.values()) for cpu in laps)
        if total:
            parts = (f"{name} {sum(cpu[name] for cpu in laps) / total:.1%}" for name in laps[0])
            found.append(f"{counted(point['jobs'], 'job')}: {', '.join(parts)}")
    return found


def show(results: Figures) -> None:
    console = Console()
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in _head(results)[:-1]:
        table.add_column(name, overflow="fold")
    for name, *cells, goal in _rows(results):
        table.add_row(f"{name}\n  goal {goal}" if goal else name, *cells)
    console.print(table)
    console.print(_note(results))
    if sentences := _processor_time(results):
        console.print("Processor time:", "; ".join(sentences))
