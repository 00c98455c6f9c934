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
    workers = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("worker", "model", "state", "rows", "waiting", "mode", "depth", "accepted"):
        workers.add_column(name, no_wrap=name != "worker", overflow="fold")
    for name in ("tokens/s", "prompt/s", "memory"):
        workers.add_column(name, no_wrap=True, justify="right")
    for model in models:
        counts = [str(model[priority]) for priority in PRIORITIES]
        waiting.add_row(model["alias"], model["model"], *counts, str(len(model["workers"])))
        for figures in model["workers"]:
            workers.add_row(*_cells(model["alias"], WorkerFigures.model_validate(figures)))
    console.print(waiting)
    if workers.row_count:
        console.print(workers)
    else:
        console.print("no worker is running", style="yellow")


def _cells(alias: str, worker: WorkerFigures) -> list[str]:
    used = worker.weight_bytes + worker.cache_bytes
    return [
        worker.name,
        alias,
        worker.state,
        f"{worker.rows}/{worker.max_rows}",
        str(worker.waiting),
        worker.mode,
        str(worker.depth),
        "-" if worker.acceptance is None else f"{worker.acceptance:.0%}",
        f"{worker.tokens_per_second:.0f}",
        f"{worker.prompt_tokens_per_second:.0f}",
        f"{used / GIB:.1f}/{worker.memory_limit / GIB:.1f} GiB",
    ]
