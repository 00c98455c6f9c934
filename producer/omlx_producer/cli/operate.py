"""omlx-submit batches, pause, resume, drain and delete."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
import redis

from omlx_producer.cli.overview import Fitted
from omlx_producer.commands.session import open_producer, redis_option
from omlx_producer.connection import server_time
from omlx_producer.console import TableConsole
from omlx_producer.errors import InvalidRequest, UnknownJob
from omlx_producer.operate import (
    batch_bytes,
    delete_by_id,
    drain_worker,
    find_batches,
    pause_model,
    resume_model,
)
from omlx_producer.program import INVALID, SectionedCommand, json_option, say
from omlx_producer.terminal import duration, in_units, write

ids_argument = click.argument("ids", nargs=-1, required=True, metavar="ID...")


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
