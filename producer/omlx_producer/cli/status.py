"""omlx-submit status and cancel: jobs, batches, models and workers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click
import redis
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.bulk.batch import is_batch_id
from omlx_producer.cli.batch import cancel_batch, show_batch
from omlx_producer.cli.common import job_argument, json_option, open_producer, redis_option
from omlx_producer.models import count_waiting, read_models
from omlx_producer.protocol import PRIORITIES
from omlx_producer.workers import WorkerFigures, read_workers

GIB = 2**30


@click.command()
@click.argument("job_id", required=False)
@json_option
@redis_option
def status(job_id: str | None, as_json: bool, redis_url: str | None) -> None:
    """Show a job or batch; without JOB_ID, models and workers."""
    if job_id is not None and is_batch_id(job_id):
        show_batch(job_id, redis_url, as_json=as_json)
        return
    with open_producer(redis_url) as producer:
        if job_id is None:
            lines = read_overview(producer.connection)
            if not lines:
                click.echo("no worker has announced a model yet", err=True)
            elif not as_json:
                print_overview(lines, Console())
                return
        else:
            lines = [dataclasses.asdict(producer.status(job_id))]
    for line in lines:
        if as_json:
            click.echo(json.dumps(line, default=lambda time: time.isoformat()))
        else:
            known = {name: value for name, value in line.items() if value is not None}
            click.echo("\n".join(f"{name:<15} {value}" for name, value in known.items()))


@click.command()
@job_argument
@redis_option
def cancel(job_id: str, redis_url: str | None) -> None:
    """Cancel a job or batch; prints cancelled, stopping or over.

    A waiting job never runs, a running one is stopped. A batch keeps the results that it has.
    """
    if is_batch_id(job_id):
        cancel_batch(job_id, redis_url)
        return
    with open_producer(redis_url) as producer:
        click.echo(producer.cancel(job_id))


COMMANDS = (status, cancel)


def read_overview(connection: redis.Redis) -> list[dict[str, Any]]:
    """For each model: its alias and limits, its waiting jobs by priority, and its ``workers``."""
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
    """Print a table of models and their queues, and one of workers for each model."""
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
    """The workers of a model in at most 80 columns; long names are folded."""
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
