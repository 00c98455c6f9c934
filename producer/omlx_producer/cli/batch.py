"""omlx-submit results; status, watch and cancel of a batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.batch import Batch, BatchState
from omlx_producer.bulk.detached import fetch, fetched_text, follow, require_free, was_fetched
from omlx_producer.bulk.output import real_path
from omlx_producer.bulk.progress import left_text, written_text
from omlx_producer.bulk.table import TableForm, columns_of
from omlx_producer.commands.options import (
    choice_option,
    output_option,
    run_options,
    schema_option,
)
from omlx_producer.commands.session import goes_on, open_producer, redis_option
from omlx_producer.errors import UnknownJob
from omlx_producer.program import JOB_ENDED_BADLY, NOT_ENDED, SectionedCommand, option
from omlx_producer.terminal import counted, local_time, write

READ_SECONDS, CANCEL_SECONDS = 0.1, 10.0
# What `status` shows of a batch even if it is 0.
ALWAYS = ("rows", "ok")

batch_argument = click.argument("batch_id")


@click.command(cls=SectionedCommand)
@batch_argument
@output_option()
@option("--wait", section="Output", is_flag=True, help="Wait for the end of the batch.")
@option("--partial", section="Output", is_flag=True, help="End with 0 although some are missing.")
@option("--keep", section="Output", is_flag=True, help="Leave the results in Redis, too.")
@run_options("Output", "with_body", "csv_safe")
@schema_option("Columns for its properties in a CSV or Parquet.", section="Output")
@choice_option("Columns for their probabilities; repeatable.", section="Output")
@redis_option
def results(
    batch_id: str,
    output: Path | None,
    wait: bool,
    partial: bool,
    keep: bool,
    with_body: bool,
    csv_safe: bool,
    response_format: dict[str, Any] | None,
    choice: list[str] | None,
    redis_url: str | None,
) -> None:
    """Write the results of a batch so far, in input order.

    Those of a batch that is over leave Redis once they are in a file, or after seven days.

    Exit codes: 0 all rows are done, 1 some failed or the batch was cancelled, 2 usage, 3 Redis
    unreachable, 4 the batch has not ended.
    """
    with open_producer(redis_url) as producer:
        batch = Batch(producer.connection, batch_id)
        output = output and real_path(output)
        state = batch.read()
        if was_fetched(state, output):
            write(fetched_text(state) + "\n", err=True)
        else:
            if output is not None:
                require_free(output, batch)
            state = follow(batch, "auto") if wait else batch.read()
            if output is None:
                for line in batch.results(state):
                    write(line.decode("utf-8", "replace"))
            else:
                columns = columns_of(response_format, choice)
                form = TableForm(with_body, columns, csv_safe=csv_safe)
                files = fetch(batch, state, output, form, keep=keep)
                if files:
                    write(written_text(files) + "\n", err=True)
    if state.ok + state.failed < state.rows or not state.over:
        tell_how_far(state)
    elif state.failed:
        click.echo(f"{state.failed} of {counted(state.rows, 'row')} failed", err=True)
    if not (state.over or partial):
        raise click.exceptions.Exit(NOT_ENDED)
    if state.failed or (state.state == "cancelled" and not partial):
        raise click.exceptions.Exit(JOB_ENDED_BADLY)


def show_batch(batch_id: str, url: str | None, *, as_json: bool) -> None:
    """``omlx-submit status`` of a batch."""
    with open_producer(url) as producer:
        state = Batch(producer.connection, batch_id).read()
    if as_json:
        write(state.model_dump_json() + "\n")
        return
    figures = state.model_dump(exclude={"over", "failed"})
    figures |= figures.pop("usage")
    figures["models"] = ", ".join(state.models)
    figures["failures"] = ", ".join(f"{count} {code}" for code, count in state.failures.items())
    for name, value in figures.items():
        if value or name in ALWAYS:
            write(f"{name:<17} {local_time(value) if name.endswith('_at') else value}\n")


def watch_batch(batch_id: str, url: str | None, *, as_json: bool) -> None:
    """``omlx-submit watch`` of a batch."""
    with open_producer(url) as producer:
        producer.connection.ping()
        with goes_on("batch", batch_id):
            state = follow(Batch(producer.connection, batch_id), "ndjson" if as_json else "auto")
    if state.state == "cancelled" and not as_json:
        tell_how_far(state)
    if state.failed or state.state != "done":
        raise click.exceptions.Exit(JOB_ENDED_BADLY)


def tell_how_far(state: BatchState) -> None:
    """Say on stderr how many rows of a batch have ended, and how many never will."""
    ended, rows = state.ok + state.failed, counted(state.rows, "row")
    dropped = state.rows - ended if state.over else 0
    never = f"; {left_text(dropped)}" if dropped else ""
    click.echo(f"{state.id}: {state.state}, {ended} of {rows} ended{never}", err=True)


def cancel_batch(batch_id: str, url: str | None) -> str:
    """``omlx-submit cancel`` of a batch; returns the outcome.

    It waits for the rows that run to stop; without a worker they do not.
    """
    with open_producer(url) as producer:
        batch = Batch(producer.connection, batch_id)
        stops, deadline = batch.cancel(), time.monotonic() + CANCEL_SECONDS
        try:
            while not (state := batch.read()).over and time.monotonic() < deadline:
                time.sleep(READ_SECONDS)
        except UnknownJob:
            # The command of a run has taken what was left of it.
            return "cancelled" if stops else "over"
    if not state.over:
        return "stopping"
    return "cancelled" if state.state == "cancelled" else "over"
