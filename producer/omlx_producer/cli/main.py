"""omlx-submit: submit a prompt and watch its text come; look at, wait for and cancel jobs.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the job failed or was
cancelled, 2 usage or an invalid request, 3 Redis unreachable, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import click
from redis.exceptions import ConnectionError, TimeoutError
from rich.console import Console

from omlx_producer.bulk.batch import is_batch_id
from omlx_producer.cli import batch, bulk
from omlx_producer.cli.common import (
    BROKEN_PIPE,
    INTERRUPTED,
    INVALID,
    JOB_ENDED_BADLY,
    fail,
    json_option,
    open_producer,
    redis_option,
)
from omlx_producer.cli.output import TextWriter
from omlx_producer.cli.overview import print_overview, read_overview
from omlx_producer.client import Producer
from omlx_producer.options import build_fields, sampling_options
from omlx_producer.protocol import PRIORITIES, CancelledEvent, FailedEvent, Priority
from omlx_producer.settings import without_password


class DefaultGroup(click.Group):
    """A group that takes arguments that name no command for those of ``submit``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in {"--help", "--version"}:
            args = ["submit", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read stdout has gone; Python must not fail when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None


job_argument = click.argument("job_id")


@contextlib.contextmanager
def job_goes_on(job_id: str, given_url: str | None) -> Iterator[None]:
    """Say how to watch a job again where only the watching ends."""
    try:
        yield
    except (KeyboardInterrupt, ConnectionError, TimeoutError) as reason:
        where = f" --redis-url {without_password(given_url)}" if given_url else ""
        goes_on = "\nthe job goes on; " if isinstance(reason, KeyboardInterrupt) else ""
        click.echo(f"{goes_on}watch it again with: omlx-submit watch {job_id}{where}", err=True)
        raise


def show_stream(producer: Producer, job_id: str, *, as_json: bool) -> None:
    """Print a job's events or text until its end; fail if it failed or was cancelled."""
    writer, event = TextWriter(), None
    for event in producer.stream(job_id):
        if as_json:
            click.echo(event.model_dump_json())
        else:
            writer.write(event)
    failed = isinstance(event, FailedEvent | CancelledEvent)
    if not as_json:
        if not writer.wrote and not failed:
            # Bulk jobs publish no tokens, and tokens expire.
            writer.write_body(producer.result(job_id))
        writer.end()
    if isinstance(event, FailedEvent | CancelledEvent):
        fail(JOB_ENDED_BADLY, f"job {job_id} {event.type}: {event.error}")


def show_result(producer: Producer, job_id: str, timeout: float | None, *, as_json: bool) -> None:
    body = producer.result(job_id, timeout)
    if as_json:
        click.echo(json.dumps(body, ensure_ascii=False))
        return
    writer = TextWriter()
    writer.write_body(body)
    writer.end()


@click.group(cls=DefaultGroup)
@click.version_option(package_name="omlx-queue")
def cli() -> None:
    """Submit a prompt to the queue and print its text as it is generated.

    \b
    omlx-submit "def fibonacci(n):"        submit a prompt; see omlx-submit submit --help
    echo "def fib(n):" | omlx-submit -     read it from stdin
    omlx-submit submit status              submit a prompt that is the name of a command
    omlx-submit run rows.jsonl -o out.jsonl        a file of requests in, one of results out
    """


@cli.command()
@click.argument("prompt")
@click.option("--model", help="A model's alias; may be left out where only one is known.")
@click.option("--priority", type=click.Choice(PRIORITIES), default="default", show_default=True)
@click.option("--chat", is_flag=True, help="Send the text as a user message, not as a raw prompt.")
@click.option("--system", help="A system message before it; needs --chat.")
@click.option("--no-stream", is_flag=True, help="Print the text at once when it is complete.")
@click.option("--detach", is_flag=True, help="Print the job's id and do not wait.")
@click.option("--queue-anyway", is_flag=True, help="Take a model that no worker has announced.")
@click.option("--idempotency-key", metavar="KEY", help="Submit once: again, it finds the same job.")
@click.option("--idempotent", is_flag=True, help="The same, with a key made from the request.")
@json_option
@redis_option
@sampling_options
def submit(
    prompt: str,
    model: str | None,
    priority: Priority,
    chat: bool,
    system: str | None,
    no_stream: bool,
    detach: bool,
    queue_anyway: bool,
    idempotency_key: str | None,
    idempotent: bool,
    as_json: bool,
    redis_url: str | None,
    **sampling: Any,
) -> None:
    """Submit PROMPT ("-" reads stdin) and print its text as it is generated.

    With --json, events are printed as they come, one a line; with --no-stream too, the result.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat; add it, or leave --system out.")
    fields = build_fields(
        read_stdin() if prompt == "-" else prompt, chat=chat, system=system, sampling=sampling
    )
    if not detach:
        fields["stream"] = not no_stream
    if model is not None:
        fields["model"] = model
    with open_producer(redis_url) as producer:
        job = producer.submit(
            fields,
            priority=priority,
            require_known_model=not queue_anyway,
            idempotency_key=idempotency_key,
            idempotent=idempotent,
        )
        if detach:
            click.echo(job.id)
            return
        click.echo(f"job {job.id}", err=True)
        with job_goes_on(job.id, redis_url):
            if no_stream:
                show_result(producer, job.id, None, as_json=as_json)
            else:
                show_stream(producer, job.id, as_json=as_json)


@cli.command()
@job_argument
@json_option
@redis_option
def watch(job_id: str, as_json: bool, redis_url: str | None) -> None:
    """Print the text of a job from its beginning, and what comes as it comes.

    Of a batch: how far it is, until its end.
    """
    if is_batch_id(job_id):
        batch.watch_batch(job_id, redis_url, as_json=as_json)
        return
    with open_producer(redis_url) as producer, job_goes_on(job_id, redis_url):
        show_stream(producer, job_id, as_json=as_json)


@cli.command()
@job_argument
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait at most.")
@json_option
@redis_option
def result(job_id: str, timeout: float | None, as_json: bool, redis_url: str | None) -> None:
    """Wait for a job and print its text, or with --json its response body."""
    with open_producer(redis_url) as producer, job_goes_on(job_id, redis_url):
        show_result(producer, job_id, timeout, as_json=as_json)


@cli.command()
@click.argument("job_id", required=False)
@json_option
@redis_option
def status(job_id: str | None, as_json: bool, redis_url: str | None) -> None:
    """Print what a job or batch is doing; without JOB_ID, models, queues and workers."""
    if job_id is not None and is_batch_id(job_id):
        batch.show_batch(job_id, redis_url, as_json=as_json)
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


@cli.command()
@job_argument
@redis_option
def cancel(job_id: str, redis_url: str | None) -> None:
    """Cancel a job that waits, or stop one that runs; prints cancelled, stopping or over.

    Of a batch: take out the rows that wait, stop those that run, keep the results.
    """
    if is_batch_id(job_id):
        batch.cancel_batch(job_id, redis_url)
        return
    with open_producer(redis_url) as producer:
        click.echo(producer.cancel(job_id))


for command in bulk.COMMANDS:
    cli.add_command(command)


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        fail(INVALID, f"stdin: got bytes that are not UTF-8 ({error})")


def main() -> None:
    cli(prog_name="omlx-submit")
