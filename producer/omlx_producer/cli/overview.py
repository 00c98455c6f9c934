"""The models that workers have announced, their queues and their workers, as tables."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import redis
from redis.exceptions import RedisError
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omlx_producer.complaints import waiting_text
from omlx_producer.console import TableConsole
from omlx_producer.figures import ModelFigures, read_figures
from omlx_producer.outage import passes
from omlx_producer.terminal import duration, one_cell, write

# Columns of a folded name, at least, and those between two columns.
LEAST_NAME, GAP = 12, 2
NOTHING_ANNOUNCED = "no worker has announced a model yet; start one with omlx-worker run -m MODEL"


def watch_figures(connection: redis.Redis, seconds: float, *, as_json: bool) -> NoReturn:
    """Show the models until interrupted, also while Redis is away.

    A terminal is redrawn. Otherwise each turn prints a block, or a line of JSON.

    Raises:
        redis.exceptions.RedisError: if Redis is away at the start, or refuses.
    """
    console = TableConsole()
    live = None
    if sys.stdout.isatty() and console.is_interactive and not as_json:
        live = Live(console=console, auto_refresh=False)
    models, trouble = read_figures(connection), ""
    with live or contextlib.nullcontext():
        while True:
            if as_json:
                found = [model.model_dump() for model in models]
                told = {"error": trouble} if trouble else {"models": found}
                write(json.dumps({"at": time.time(), **told}) + "\n")
            else:
                view = Group(_headline(trouble, seconds), draw_figures(models))
                if live is None:
                    console.print(view)
                else:
                    live.update(view, refresh=True)
            time.sleep(seconds)
            try:
                models, trouble = read_figures(connection), ""
            except RedisError as error:
                if not passes(error):
                    raise
                trouble = waiting_text(error)


def draw_figures(models: Sequence[ModelFigures]) -> RenderableType:
    """A table of models and their queues, and one of workers for each model."""
    if not models:
        return Text(NOTHING_ANNOUNCED)
    rows = [
        {
            "model": model.alias,
            "serves": model.info.model if model.info else "not announced",
            **{name: str(queue.waiting) for name, queue in model.queues.items()},
            "oldest": "-" if model.oldest_seconds is None else duration(model.oldest_seconds),
            "workers": str(len(model.workers)),
        }
        for model in models
    ]
    parts: list[RenderableType] = [Fitted(rows, ("model", "serves"), ("serves", "oldest"))]
    parts += [_workers(model) for model in models if model.workers]
    parts += [Text(one_cell(line), style="dim") for model in models for line in model.depths]
    notes = dict.fromkeys(line for model in models for line in model.notes)
    parts += [Text(one_cell(line), style="yellow") for line in notes]
    return Group(*parts)


def draw_models(models: Sequence[ModelFigures]) -> RenderableType:
    """A table of announced models and their limits."""
    rows = []
    for model in models:
        if (info := model.info) is None:
            continue
        drafts, workers = info.draft_depth, model.workers
        rows.append(
            {
                "model": model.alias,
                "serves": info.model,
                "context": str(info.context_length),
                "drafts": "?" if drafts is None else f"up to {drafts}" if drafts else "none",
                "workers": str(len(workers)),
                "rows": f"{sum(w.rows for w in workers)}/{sum(w.max_rows for w in workers)}",
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


def _workers(model: ModelFigures) -> Fitted:
    name, *columns = model.table[0]
    dispensable = ("cached", "accept", "wait", "depth", "memory")
    return Fitted(model.table, (name,), [each for each in dispensable if each in columns])
