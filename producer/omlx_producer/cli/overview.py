"""The models that workers have announced, their queues and their workers, as tables."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any, NoReturn

import redis
from redis.exceptions import RedisError
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omlx_producer.bulk.progress import duration
from omlx_producer.models import read_models
from omlx_producer.outage import passes, waiting_text
from omlx_producer.protocol import PRIORITIES, ModelInfo
from omlx_producer.terminal import one_cell, write
from omlx_producer.waiting import queued_models, read_waiting
from omlx_producer.workers import WorkerFigures, read_workers, server_time

MIB, GIB = 2**20, 2**30
NO_MODEL = "no worker has announced a model yet; start one with omlx-worker run"

Overview = list[dict[str, Any]]


class TableConsole(Console):
    """A console that leaves a broken pipe, and the exit code for it, to the program."""

    def on_broken_pipe(self) -> None:
        raise


def read_overview(connection: redis.Redis) -> Overview:
    """For each model: its alias and limits, its waiting jobs by priority, and its ``workers``.

    ``oldest_seconds`` is the age of the oldest job that is first in a queue. A model that no worker
    has announced is there while jobs wait for it; its limits are None.
    """
    models: dict[str, ModelInfo | None] = {**read_models(connection)}
    now = server_time(connection)
    overview = []
    for alias in (*models, *sorted(queued_models(connection) - models.keys())):
        waiting, info = read_waiting(connection, alias, now), models.get(alias)
        if info is None and not any(waiting.counts.values()):
            continue
        workers = [worker.model_dump() for worker in read_workers(connection, alias)]
        overview.append(
            {
                "alias": alias,
                **(info.model_dump() if info else dict.fromkeys(ModelInfo.model_fields)),
                **waiting.counts,
                "oldest_seconds": waiting.oldest_seconds,
                "workers": workers,
            }
        )
    return overview


def watch_overview(connection: redis.Redis, seconds: float, *, as_json: bool) -> NoReturn:
    """Show the overview until interrupted, also while Redis is away.

    A terminal is redrawn. Otherwise each turn prints a block, or a line of JSON.

    Raises:
        redis.exceptions.RedisError: if Redis is away at the start, or refuses.
    """
    console = TableConsole()
    live = None
    if sys.stdout.isatty() and console.is_interactive and not as_json:
        live = Live(console=console, auto_refresh=False)
    overview, trouble = read_overview(connection), ""
    with live or contextlib.nullcontext():
        while True:
            if as_json:
                found = {"error": trouble} if trouble else {"models": overview}
                write(json.dumps({"at": time.time(), **found}) + "\n")
            else:
                view = Group(_headline(trouble, seconds), draw_overview(overview))
                if live is None:
                    console.print(view)
                else:
                    live.update(view, refresh=True)
            time.sleep(seconds)
            try:
                overview, trouble = read_overview(connection), ""
            except RedisError as error:
                if not passes(error):
                    raise
                trouble = waiting_text(error)


def draw_overview(overview: Overview) -> RenderableType:
    """A table of models and their queues, and one of workers for each model."""
    if not overview:
        return Text(NO_MODEL)
    waiting = _table("model", "serves", *PRIORITIES, "oldest", "workers")
    for model in overview:
        oldest = model["oldest_seconds"]
        waiting.add_row(
            *_texts(model["alias"], model["model"] or "not announced"),
            *(str(model[priority]) for priority in PRIORITIES),
            "-" if oldest is None else duration(oldest),
            str(len(model["workers"])),
        )
    workers = [_workers(model) for model in overview if model["workers"]]
    if not workers:
        return Group(waiting, Text("no worker is running", style="yellow"))
    return Group(waiting, *workers)


def draw_models(models: Overview) -> RenderableType:
    """A table of models and their limits."""
    table = _table("model", "serves", "context", "drafts", "workers", "rows")
    for model in models:
        workers, drafts = model["workers"], model["draft_depth"]
        table.add_row(
            *_texts(model["alias"], model["model"]),
            str(model["context_length"]),
            "?" if drafts is None else f"up to {drafts}" if drafts else "none",
            str(len(workers)),
            _share(sum(w["rows"] for w in workers), sum(w["max_rows"] for w in workers)),
        )
    return table


def _headline(trouble: str, seconds: float) -> Text:
    if trouble:
        return Text(one_cell(trouble), style="yellow")
    return Text(f"{time.strftime('%H:%M:%S')}, every {seconds:g} s; Ctrl-C ends", style="dim")


def _workers(model: dict[str, Any]) -> Table:
    """The workers of a model in at most 80 columns; long names are folded."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column(*_texts(f"workers of {model['alias']}"), overflow="fold")
    workers = [WorkerFigures.model_validate(figures) for figures in model["workers"]]
    rows = [_cells(worker) for worker in workers]
    unused = set() if any(worker.cached for worker in workers) else {"cached"}
    names = [name for name in rows[0] if name not in unused]
    for name in names:
        table.add_column(name, no_wrap=True)
    for worker, cells in zip(workers, rows, strict=True):
        table.add_row(*_texts(worker.name, *(cells[name] for name in names)))
    return table


def _cells(worker: WorkerFigures) -> dict[str, str]:
    """What the table says of a worker, by column."""
    used = worker.weight_bytes + worker.cache_bytes
    return {
        "state": worker.state,
        "rows": _share(worker.rows, worker.max_rows),
        "wait": str(worker.waiting),
        "depth": f"{worker.depth} ({worker.mode})",
        "accept": _percent(worker.acceptance),
        "cached": _percent(worker.cached),
        "tok/s": f"{worker.tokens_per_second:.0f}",
        "memory": f"{_size(used)}/{worker.memory_limit / GIB:.1f} G",
    }


def _table(*columns: str) -> Table:
    table = Table(*columns, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _size(count: int) -> str:
    """Bytes in the unit of the limit beside it, or if that would be 0.0 in MiB."""
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / MIB:.0f} M"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _texts(*texts: str) -> list[Text]:
    """Cells of text that others wrote: neither markup nor control characters count."""
    return [Text(one_cell(text)) for text in texts]
