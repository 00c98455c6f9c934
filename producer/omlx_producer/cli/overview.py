"""The models that workers have announced, their queues and their workers, as tables."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import redis
from redis.exceptions import RedisError
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omlx_producer.bulk.progress import duration
from omlx_producer.client.workers import WorkerFigures
from omlx_producer.operate import Overview, read_overview
from omlx_producer.outage import passes, waiting_text
from omlx_producer.terminal import counted, local_time, one_cell, write
from omlx_producer.wire import PRIORITIES

MIB, GIB = 2**20, 2**30
# Columns of a folded name, at least, and those between two columns.
LEAST_NAME, GAP = 12, 2
NO_MODEL = "no worker has announced a model yet; start one with omlx-worker run"


class TableConsole(Console):
    """A console that leaves a broken pipe, and the exit code for it, to the program."""

    def on_broken_pipe(self) -> None:
        raise


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
    rows: list[dict[str, str]] = []
    for model in overview:
        oldest = model["oldest_seconds"]
        rows.append(
            {
                "model": model["alias"],
                "serves": model["model"] or "not announced",
                **{priority: str(model[priority]) for priority in PRIORITIES},
                "oldest": "-" if oldest is None else duration(oldest),
                "workers": str(len(model["workers"])),
            }
        )
    parts: list[RenderableType] = [Fitted(rows, ("model", "serves"), ("serves", "oldest"))]
    parts += [_workers(model) for model in overview if model["workers"]]
    if len(parts) == 1:
        parts.append(Text("no worker is running", style="yellow"))
    workers = [each for model in overview for each in model["workers"]]
    parts += [_choice(each) for each in workers if _chooses(each)]
    parts += [_slowed(each) for each in workers if each["conditions"]]
    parts += [_rest(each) for each in workers if each["rests_until"]]
    parts += [_pause(model["alias"]) for model in overview if model["paused"]]
    return Group(*parts, *(_farewell(model, each) for model in overview for each in model["gone"]))


def draw_models(models: Overview) -> RenderableType:
    """A table of models and their limits."""
    rows = []
    for model in models:
        workers, drafts = model["workers"], model["draft_depth"]
        rows.append(
            {
                "model": model["alias"],
                "serves": model["model"],
                "context": str(model["context_length"]),
                "drafts": "?" if drafts is None else f"up to {drafts}" if drafts else "none",
                "workers": str(len(workers)),
                "rows": _share(
                    sum(w["rows"] for w in workers), sum(w["max_rows"] for w in workers)
                ),
            }
        )
    return Fitted(rows, ("model", "serves"), ("serves",))


class Fitted:
    """A table that leaves columns out where its width is short, and folds wide names.

    Args:
        rows: cells by column. Others may have written them: neither markup nor control characters
            count.
        names: columns that may be folded.
        dispensable: columns that may be left out, the first of them first.
    """

    def __init__(
        self, rows: list[dict[str, str]], names: Sequence[str], dispensable: Sequence[str]
    ) -> None:
        self._rows = [{name: one_cell(text) for name, text in row.items()} for row in rows]
        self._names = names
        self._dispensable = dispensable

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        columns = list(self._rows[0])
        for name in self._dispensable:
            if self._least_width(columns) > options.max_width:
                columns.remove(name)
        table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
        for column in columns:
            foldable = column in self._names
            table.add_column(Text(one_cell(column)), overflow="fold", no_wrap=not foldable)
        for row in self._rows:
            table.add_row(*(Text(row[column]) for column in columns))
        yield table

    def _least_width(self, columns: list[str]) -> int:
        widths = [max(cell_len(row[column]) for row in self._rows) for column in columns]
        return sum(
            min(width, LEAST_NAME) if column in self._names else max(width, cell_len(column))
            for column, width in zip(columns, widths, strict=True)
        ) + GAP * len(columns)


def _headline(trouble: str, seconds: float) -> Text:
    if trouble:
        return Text(one_cell(trouble), style="yellow")
    return Text(f"{time.strftime('%H:%M:%S')}, every {seconds:g} s; Ctrl-C ends", style="dim")


def _workers(model: dict[str, Any]) -> Fitted:
    workers = [WorkerFigures.model_validate(figures) for figures in model["workers"]]
    title = f"workers of {model['alias']}"
    rows = [{title: worker.name, **_cells(worker)} for worker in workers]
    if not any(worker.cached for worker in workers):
        for row in rows:
            del row["cached"]
    dispensable = [
        name for name in ("cached", "accept", "wait", "depth", "memory") if name in rows[0]
    ]
    return Fitted(rows, (title,), dispensable)


def _chooses(worker: dict[str, Any]) -> bool:
    """Whether a worker measures what drafts bring, and has a batch to draft for."""
    return worker["mode"] == "auto" and worker["rows"] > 0 and bool(worker["reason"])


def _choice(worker: dict[str, Any]) -> Text:
    """Why a worker drafts as deep as it does."""
    return Text(one_cell(f"{worker['name']} drafts: {worker['reason']}"), style="dim")


def _slowed(worker: dict[str, Any]) -> Text:
    """What slows a worker's machine, or keeps it from taking jobs."""
    told = f"{worker['name']}: {', '.join(worker['conditions'])}"
    if worker["state"] == "on battery":
        told += "; it takes no jobs (--only-on-power)"
    return Text(one_cell(told), style="yellow")


def _rest(worker: dict[str, Any]) -> Text:
    """When the hours of a worker begin."""
    told = f"{worker['name']} rests until {local_time(worker['rests_until'])} (--hours)"
    return Text(one_cell(told), style="yellow")


def _pause(alias: str) -> Text:
    told = f"{alias} is paused; omlx-submit resume {alias} lets it go on"
    return Text(one_cell(told), style="yellow")


def _farewell(model: dict[str, Any], worker: dict[str, Any]) -> Text:
    """What becomes of the jobs of a worker that is gone."""
    jobs, seconds = counted(worker["jobs"], "job"), worker["jobs_go_on_in_seconds"]
    verb = "goes" if worker["jobs"] == 1 else "go"
    what = f"; its {jobs} {verb} on elsewhere"
    if not worker["jobs"]:
        what = ""
    elif not model["workers"]:
        what = f"; its {jobs} {verb} on once another worker serves {model['alias']}"
    elif seconds:
        what += f" in {seconds:.0f} s"
    silent = duration(worker["silent_seconds"])
    return Text(one_cell(f"{worker['name']} has been silent for {silent}{what}"), style="yellow")


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


def _size(count: int) -> str:
    """Bytes in the unit of the limit beside it, or if that would be 0.0 in MiB."""
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / MIB:.0f} M"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
