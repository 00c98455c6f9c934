"""omlx-submit results and feed; status, watch and cancel of a batch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from redis.exceptions import RedisError

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.batch_feeder import WAIT_SECONDS, BatchFeed, Feeder, LockLost
from omlx_producer.bulk.batch_state import BatchState
from omlx_producer.bulk.loop import serve
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.output import (
    real_path,
    require_batch_output,
    require_output,
    require_own_table,
    write_results,
)
from omlx_producer.bulk.progress import Style, make_display, written_text
from omlx_producer.bulk.runfile import run_path
from omlx_producer.bulk.table import TableForm, properties_of
from omlx_producer.cli.common import (
    INTERRUPTED,
    INVALID,
    JOB_ENDED_BADLY,
    NOT_ENDED,
    csv_safe_option,
    fail,
    local_time,
    output_option,
    redis_option,
    say,
    with_body_option,
)
from omlx_producer.cli.form import json_schema_option
from omlx_producer.cli.sections import SectionedCommand, option
from omlx_producer.cli.session import goes_on, open_producer
from omlx_producer.cli.wait_reason import LOOK_SECONDS
from omlx_producer.signals import StopSignals
from omlx_producer.terminal import write
from omlx_producer.wording import counted

CANCEL_SECONDS = 10.0
TIMES = ("created_at", "ended_at")
# What `status` shows of a batch even if it is 0.
ALWAYS = ("rows", "ok")

batch_argument = click.argument("batch_id")


@click.command(cls=SectionedCommand)
@batch_argument
@output_option
@option("--wait", section="Output", is_flag=True, help="Wait for the end of the batch.")
@option("--partial", section="Output", is_flag=True, help="End with 0 although some are missing.")
@with_body_option
@csv_safe_option
@json_schema_option("Columns for its properties in a CSV or Parquet.", section="Output")
@redis_option
def results(
    batch_id: str,
    output: Path | None,
    wait: bool,
    partial: bool,
    with_body: bool,
    csv_safe: bool,
    response_format: dict[str, Any] | None,
    redis_url: str | None,
) -> None:
    """Write the results of a batch so far, in input order.

    Exit codes: 0 all rows are done, 1 some failed or the batch was cancelled, 2 usage, 3 Redis
    unreachable, 4 the batch has not ended.
    """
    with open_producer(redis_url) as producer:
        batch = Batch(producer.connection, batch_id)
        if output is not None:
            output = real_path(output)
            if run_path(output).exists():
                fail(INVALID, f"--output: {output} belongs to an omlx-submit run; give another")
            require_output(output)
            require_own_table(output)
            require_batch_output(output, batch.run, batch.results(batch.read().rows))
        state = follow(batch, "auto") if wait else batch.read()
        if output is None:
            for line in batch.results(state.rows):
                write(line.decode("utf-8", "replace"))
        else:
            form = TableForm(with_body, properties_of(response_format), csv_safe=csv_safe)
            files = write_results(batch.results(state.rows), output, form)
            write(written_text(files) + "\n", err=True)
    if state.ok + state.failed < state.rows or not state.over:
        tell_how_far(state)
    elif state.failed:
        click.echo(f"{state.failed} of {counted(state.rows, 'row')} failed", err=True)
    if not (state.over or partial):
        raise click.exceptions.Exit(NOT_ENDED)
    if state.failed or (state.state == "cancelled" and not partial):
        raise click.exceptions.Exit(JOB_ENDED_BADLY)


@click.command(cls=SectionedCommand)
@click.option("--burst", is_flag=True, help="End when no batch is left.")
@redis_option
def feed(burst: bool, redis_url: str | None) -> None:
    """Feed detached batches to the workers until interrupted.

    Any number of feeders may run, on any machine; each batch has one of them. When a feeder ends,
    another takes over its batches.
    """
    signals = StopSignals()
    with open_producer(redis_url) as producer, signals.caught():
        feeder = Feeder(producer.connection)
        say(f"feeding detached batches until {'none is left' if burst else 'Ctrl-C'}")
        try:
            serve(feeder, signals, burst=burst)
        finally:
            with contextlib.suppress(RedisError):
                feeder.leave()
    if signals.asked:
        say("interrupted; another feeder can go on with its batches")
        raise click.exceptions.Exit(INTERRUPTED)
    say("no batch is left")


def show_batch(batch_id: str, url: str | None, *, as_json: bool) -> None:
    """``omlx-submit status`` of a batch."""
    with open_producer(url) as producer:
        state = dataclasses.asdict(Batch(producer.connection, batch_id).read())
    if as_json:
        write(json.dumps(state) + "\n")
    else:
        known = {
            name: _shown(name, value) for name, value in state.items() if value or name in ALWAYS
        }
        write("".join(f"{name:<17} {value}\n" for name, value in known.items()))


def _shown(name: str, value: Any) -> Any:
    """A figure of a batch as people read it."""
    if name == "failures":
        return ", ".join(f"{count} {code}" for code, count in value.items())
    return local_time(datetime.fromtimestamp(value, UTC)) if name in TIMES else value


def watch_batch(batch_id: str, url: str | None, *, as_json: bool) -> None:
    """``omlx-submit watch`` of a batch."""
    with open_producer(url) as producer, goes_on("batch", batch_id, url):
        state = follow(Batch(producer.connection, batch_id), "ndjson" if as_json else "auto")
    if state.state == "cancelled" and not as_json:
        tell_how_far(state)
    if state.failed or state.state != "done":
        raise click.exceptions.Exit(JOB_ENDED_BADLY)


def tell_how_far(state: BatchState) -> None:
    """Say on stderr how many rows of a batch have ended."""
    ended, rows = state.ok + state.failed, counted(state.rows, "row")
    click.echo(f"{state.id}: {state.state}, {ended} of {rows} ended", err=True)


def cancel_batch(batch_id: str, url: str | None) -> None:
    """``omlx-submit cancel`` of a batch: waits for its end, then prints the outcome."""
    with open_producer(url) as producer:
        batch = Batch(producer.connection, batch_id)
        state = batch.read().state
        if state == "uploading":
            fail(INVALID, f"{batch_id}: its upload is not finished; interrupt the upload instead")
        click.echo(_finish_cancelling(batch) if batch.ask_to_cancel() else "over")


def follow(batch: Batch, progress: Style) -> BatchState:
    """Show the progress of a batch until its end, and say if no feeder has it."""
    display, meter = make_display(progress), Meter()
    state = batch.read()
    fed_at, told = time.monotonic(), False
    # Rates are those from now on.
    meter.adopt(state)
    meter.restart()
    try:
        while not state.over:
            time.sleep(WAIT_SECONDS)
            state = batch.read()
            meter.adopt(state)
            display.update(meter)
            if state.state == "uploading" or batch.has_feeder():
                fed_at, told = time.monotonic(), False
            elif not told and time.monotonic() - fed_at > LOOK_SECONDS:
                say(f"no feeder has {batch.id}; start one with: omlx-submit feed")
                told = True
    finally:
        display.end(meter)
    return state


def _finish_cancelling(batch: Batch) -> str:
    """Wait for the feeder to cancel the batch; without a feeder, cancel it here."""
    deadline, feed = time.monotonic() + CANCEL_SECONDS, None
    while time.monotonic() < deadline:
        state = batch.read()
        if state.over:
            return "cancelled" if state.state == "cancelled" else "over"
        try:
            if feed is None and (feed := BatchFeed.begin(batch)) is not None:
                # Reading a large batch may have taken longer than the deadline.
                deadline = time.monotonic() + CANCEL_SECONDS
            if feed is None:
                time.sleep(WAIT_SECONDS / 5)
            elif not feed.turn(WAIT_SECONDS):
                return "cancelled"
        except LockLost:
            feed = None
    if feed is not None:
        feed.leave()
    return "stopping"
