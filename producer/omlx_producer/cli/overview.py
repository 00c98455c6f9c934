"""The table of ``omlx-submit status``: models, what waits for them, and who works on it."""

from __future__ import annotations

from typing import Any

import redis
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.models import count_waiting, read_models
from omlx_producer.protocol import PRIORITIES
from omlx_producer.workers import WorkerFigures, read_workers

GIB = 2**30


def read_overview(connection: redis.Redis) -> list[dict[str, Any]]:
    """For every model: its alias and limits, jobs waiting by priority, and its ``workers``."""
    return [
        {
            "alias": alias,
            **info.model_dump(),
            **count_waiting(connection, alias),
            "workers": [worker.model_dump() for worker in read_workers(connection, alias)],
        }
        for alias, info in read_models(connection).items()
    ]


def print_overview(models: list[dict[str, Any]], console: Console) -> None:
    waiting = Table("model", "serves", *PRIORITIES, "workers", box=box.SIMPLE, pad_edge=False)
    for model in models:
        counts = [str(model[priority]) for priority in PRIORITIES]
        waiting.add_row(model["alias"], model["model"], *counts, str(len(model["workers"])))
    console.print(waiting)
    if not any(model["workers"] for model in models):
        console.print("no worker is running", style="yellow")
    for model in models:
        if model["workers"]:
            console.print(_workers(model))


def _workers(model: dict[str, Any]) -> Table:
    """Narrow enough for a terminal of 80 columns; long names are folded."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column(f"workers of {model['alias']}", overflow="fold")
    for name in ("state", "rows", "wait", "depth", "accept", "tok/s", "memory"):
        table.add_column(name, no_wrap=True)
    for figures in model["workers"]:
        table.add_row(*_cells(WorkerFigures.model_validate(figures)))
    return table


def _cells(worker: WorkerFigures) -> list[str]:
    used = worker.weight_bytes + worker.cache_bytes
    return [
        worker.name,
        worker.state,
        f"{worker.rows}/{worker.max_rows}",
        str(worker.waiting),
        f"{worker.depth} ({worker.mode})",
        "-" if worker.acceptance is None else f"{worker.acceptance:.0%}",
        f"{worker.tokens_per_second:.0f}",
        f"{used / GIB:.1f}/{worker.memory_limit / GIB:.1f} G",
    ]
