"""omlx-submit batches, jobs, pause, resume, drain, requeue and delete."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import click
import redis

from omlx_producer.cli.overview import Fitted
from omlx_producer.client.outcome import Status
from omlx_producer.commands.session import open_producer, redis_option
from omlx_producer.connection import server_time
from omlx_producer.console import TableConsole
from omlx_producer.errors import InvalidRequest, UnknownJob
from omlx_producer.operate import (
    STATUSES,
    ListedJob,
    batch_bytes,
    delete_by_id,
    drain_worker,
    find_batches,
    pause_model,
    read_jobs,
    requeue_job,
    resume_model,
)
from omlx_producer.program import INVALID, SectionedCommand, json_option, option, say
from omlx_producer.terminal import duration, in_units, write

SHOWN_JOBS = 100
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")


def _seconds(_: click.Context, __: click.Parameter, text: str | None) -> float:
    if text is None:
        return 0.0
    if re.fullmatch(r"[0-9]{1,9}[smhd]", text) is None:
        raise click.BadParameter(f"got {text!r}; give a number and s, m, h or d, as in 90m")
    return float(text[:-1]) * _UNITS[text[-1]]


@click.command(cls=SectionedCommand)
@json_option
@redis_option
def batches(as_json: bool, redis_url: str | None) -> None:
    """List all batches: progress, age and bytes in Redis."""
    with open_producer(redis_url) as producer:
        found = find_batches(producer.connection)
        sizes = [batch_bytes(producer.connection, batch) for batch in found]
        now = server_time(producer.connection)
    if as_json:
        for batch, size in zip(found, sizes, strict=True):
            write(json.dumps(batch.model_dump() | {"bytes": size}) + "\n")
    elif found:
        rows = [
            {
                "batch": batch.id,
                "state": batch.state,
                "ended": "-"
                if batch.state == "uploading"
                else f"{batch.ok + batch.failed}/{batch.rows}",
                "failed": str(batch.failed),
                "age": duration(max(0.0, now - batch.created_at)),
                "in Redis": in_units(size),
                "models": " ".join(batch.models),
            }
            for batch, size in zip(found, sizes, strict=True)
        ]
        TableConsole().print(Fitted(rows, ("models",), ("models", "failed", "in Redis")))
    else:
        click.echo("no batches", err=True)


@click.command(cls=SectionedCommand)
@option(
    "--state",
    "states",
    section="Filter",
    multiple=True,
    type=click.Choice(STATUSES),
    help="Only jobs in this state; repeatable.",
)
@option("-m", "--model", section="Filter", metavar="ALIAS", help="Only jobs of this model.")
@option(
    "--older-than",
    section="Filter",
    metavar="TIME",
    callback=_seconds,
    help="Only those this long in their state, as in 90m.",
)
@option(
    "--limit",
    section="Output",
    type=click.IntRange(min=0),
    default=SHOWN_JOBS,
    help="Show at most this many; 0 shows all.",
)
@json_option
@redis_option
def jobs(
    states: tuple[Status, ...],
    model: str | None,
    older_than: float,
    limit: int,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """List jobs: those that run, wait and have ended.

    Rows of a batch are jobs only while they run.
    """
    with open_producer(redis_url) as producer:
        every = read_jobs(producer.connection, states or STATUSES, model, older_than)
        found = list(itertools.islice(every, limit or None))
        more = next(every, None) is not None
    if as_json:
        write("".join(json.dumps(dataclasses.asdict(job)) + "\n" for job in found))
    elif found:
        rows = list(map(_job_cells, found))
        TableConsole().print(
            Fitted(rows, ("worker", "model"), ("worker", "priority", "model", "for"))
        )
    else:
        click.echo("no such jobs", err=True)
    if more:
        click.echo(f"the first {limit} are shown; --limit 0 shows all", err=True)


def _job_cells(job: ListedJob) -> dict[str, str]:
    return {
        "job": job.id,
        "state": job.state,
        "for": "-" if job.seconds is None else duration(job.seconds),
        "model": job.model,
        "priority": job.priority,
        "worker": job.worker or "-",
    }


@click.command(cls=SectionedCommand)
@click.argument("model")
@json_option
@redis_option
def pause(model: str, as_json: bool, redis_url: str | None) -> None:
    """Let the workers of a model take no new jobs.

    Jobs that run finish, and new ones wait in Redis until omlx-submit resume.
    """
    with open_producer(redis_url) as producer:
        changed = pause_model(producer.connection, model)
    _tell("model", model, "paused" if changed else "already paused", as_json=as_json)


@click.command(cls=SectionedCommand)
@click.argument("model")
@json_option
@redis_option
def resume(model: str, as_json: bool, redis_url: str | None) -> None:
    """Let the workers of a paused model go on."""
    with open_producer(redis_url) as producer:
        changed = resume_model(producer.connection, model)
    _tell("model", model, "resumed" if changed else "not paused", as_json=as_json)


@click.command(cls=SectionedCommand)
@click.argument("worker")
@json_option
@redis_option
def drain(worker: str, as_json: bool, redis_url: str | None) -> None:
    """Let a worker finish its jobs, take no more, and end."""
    with open_producer(redis_url) as producer:
        changed = drain_worker(producer.connection, worker)
    _tell("worker", worker, "draining" if changed else "already draining", as_json=as_json)


@click.command(cls=SectionedCommand)
@ids_argument
@json_option
@redis_option
def requeue(ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Put failed jobs back into their queues."""
    _for_each(ids, requeue_job, "requeued", redis_url, as_json=as_json)


@click.command(cls=SectionedCommand)
@ids_argument
@json_option
@redis_option
def delete(ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    """Delete jobs or batches with all their results.

    What runs of them is stopped.
    """
    _for_each(ids, delete_by_id, "deleted", redis_url, as_json=as_json)


def _for_each(
    ids: tuple[str, ...],
    act: Callable[[redis.Redis, str], None],
    outcome: str,
    url: str | None,
    *,
    as_json: bool,
) -> None:
    """Do the same to each job; those that refuse do not keep the others from it."""
    refused = False
    with open_producer(url) as producer:
        for job_id in ids:
            try:
                act(producer.connection, job_id)
            except (InvalidRequest, UnknownJob) as error:
                refused = True
                say(str(error))
                if as_json:
                    _tell("id", job_id, "refused", as_json=True, error=str(error))
            else:
                _tell("id", job_id, outcome, as_json=as_json)
    if refused:
        raise click.exceptions.Exit(INVALID)


def _tell(kind: str, name: str, outcome: str, *, as_json: bool, **more: Any) -> None:
    line = json.dumps({kind: name, "outcome": outcome} | more) if as_json else f"{name} {outcome}"
    write(line + "\n")
