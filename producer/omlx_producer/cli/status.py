"""omlx-submit status, models and cancel: jobs, batches, models and workers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from datetime import datetime

import click
from rich.console import RenderableType

from omlx_producer.bulk.batch import is_batch_id
from omlx_producer.cli.batch import cancel_batch, show_batch
from omlx_producer.cli.overview import NOTHING_ANNOUNCED, draw_figures, draw_models, watch_figures
from omlx_producer.cli.show import wait_reason
from omlx_producer.commands.session import job_argument, open_producer, redis_option
from omlx_producer.console import TableConsole
from omlx_producer.figures import ModelFigures, read_figures, read_unannounced
from omlx_producer.program import SectionedCommand, json_option, option
from omlx_producer.terminal import local_time, write

WATCH_SECONDS = 2.0


@click.command(cls=SectionedCommand)
@click.argument("job_id", required=False)
@option(
    "--watch",
    section="Output",
    is_flag=False,
    flag_value=WATCH_SECONDS,
    type=click.FloatRange(min=0.1, max=86_400),
    metavar="[SECONDS]",
    help=f"Show workers until Ctrl-C, every {WATCH_SECONDS:g} s by default.",
)
@json_option
@redis_option
def status(job_id: str | None, watch: float | None, as_json: bool, redis_url: str | None) -> None:
    """Show a job or batch; without JOB_ID, models and workers."""
    if job_id is not None and watch is not None:
        raise click.UsageError(f"--watch shows workers; for a job: omlx-submit watch {job_id}")
    if job_id is not None and is_batch_id(job_id):
        show_batch(job_id, redis_url, as_json=as_json)
        return
    with open_producer(redis_url) as producer:
        if watch is not None:
            watch_figures(producer.connection, watch, as_json=as_json)
        if job_id is None:
            show(read_figures(producer.connection), draw_figures, as_json=as_json)
            return
        state = dataclasses.asdict(producer.status(job_id))
        reason = wait_reason(producer.connection, job_id)
    if as_json:
        write(json.dumps(state, default=lambda time: time.isoformat()) + "\n")
    else:
        # The note says what the position means.
        known = {
            name: local_time(value) if isinstance(value, datetime) else value
            for name, value in (state | {"position": None, "note": reason}).items()
            if value is not None
        }
        write("".join(f"{name:<15} {value}\n" for name, value in known.items()))


@click.command(cls=SectionedCommand)
@json_option
@redis_option
def models(as_json: bool, redis_url: str | None) -> None:
    """List the models that workers have announced."""
    with open_producer(redis_url) as producer:
        announced = [model for model in read_figures(producer.connection) if model.info]
        nothing = read_unannounced(producer.connection) or NOTHING_ANNOUNCED
    show(announced, draw_models, as_json=as_json, nothing=nothing)


@click.command(cls=SectionedCommand)
@job_argument
@json_option
@redis_option
def cancel(job_id: str, as_json: bool, redis_url: str | None) -> None:
    """Cancel a job or batch; prints cancelled, stopping or over.

    A waiting job never runs, a running one is stopped. A batch keeps the results that it has.
    """
    if is_batch_id(job_id):
        outcome = cancel_batch(job_id, redis_url)
    else:
        with open_producer(redis_url) as producer:
            outcome = producer.cancel(job_id)
    click.echo(json.dumps({"id": job_id, "outcome": outcome}) if as_json else outcome)


def show(
    models: Sequence[ModelFigures],
    draw: Callable[[Sequence[ModelFigures]], RenderableType],
    *,
    as_json: bool,
    nothing: str = NOTHING_ANNOUNCED,
) -> None:
    """Print the models, as a table or as a line of JSON each; without any, ``nothing``."""
    if not models:
        click.echo(nothing, err=True)
    elif as_json:
        write("".join(model.model_dump_json() + "\n" for model in models))
    else:
        TableConsole().print(draw(models))
