"""omlx-submit run and retry: whole files of requests."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from redis.exceptions import RedisError

from omlx_producer.bulk.detaching import detach_job
from omlx_producer.bulk.dry_run import look_through
from omlx_producer.bulk.making import Shape
from omlx_producer.bulk.progress import STYLES, Style
from omlx_producer.bulk.readers import FORMATS, Format
from omlx_producer.bulk.runfile import read_settings, run_path
from omlx_producer.bulk.running import Job, run_job
from omlx_producer.bulk.window import DEFAULT_WINDOW
from omlx_producer.cli import batch
from omlx_producer.cli.common import (
    INTERRUPTED,
    INVALID,
    JOB_ENDED_BADLY,
    REDIS_OPTION,
    fail,
    file_trouble,
    open_producer,
    output_option,
    redis_option,
)
from omlx_producer.enqueue import JOB_SECONDS
from omlx_producer.options import sampling_options
from omlx_producer.protocol import PRIORITIES, Priority
from omlx_producer.settings import without_password

progress_option = click.option(
    "--progress",
    type=click.Choice(STYLES),
    default="auto",
    show_default=True,
    help="On stderr: a bar (on a terminal), a JSON line every few seconds, or nothing.",
)
window_option = click.option(
    "--window",
    type=click.IntRange(min=1),
    default=DEFAULT_WINDOW,
    show_default=True,
    help="At most this many rows are in Redis at once.",
)
ordered_option = click.option(
    "--ordered", is_flag=True, help="Put results in the order of the input at the end."
)


@click.command()
@click.argument("input")
@output_option
@click.option("--template", help='Makes prompts of columns, as in "Summarise: {text}".')
@click.option("--format", "kind", type=click.Choice(FORMATS), help="What INPUT is.")
@click.option("--id-field", metavar="NAME", help="The column that is the custom_id.")
@click.option("--model", help="Run all rows on this model, whatever they name.")
@click.option("--chat", is_flag=True, help="Send texts as user messages, not as raw prompts.")
@click.option("--system", help="A system message before them; needs --chat.")
@window_option
@ordered_option
@click.option("--priority", type=click.Choice(PRIORITIES), default="bulk", show_default=True)
@click.option(
    "--job-timeout", type=click.IntRange(min=1), default=JOB_SECONDS, help="Seconds a row may run."
)
@click.option("--dry-run", is_flag=True, help="Validate and count everything; run nothing.")
@click.option("--detach", is_flag=True, help="Leave the rows in Redis for omlx-submit feed.")
@click.option("--queue-anyway", is_flag=True, help="Take models that no worker has announced.")
@progress_option
@redis_option
@sampling_options
def run(
    input: str,
    output: Path | None,
    template: str | None,
    kind: Format | None,
    id_field: str | None,
    model: str | None,
    chat: bool,
    system: str | None,
    window: int,
    ordered: bool,
    priority: Priority,
    job_timeout: int,
    dry_run: bool,
    detach: bool,
    queue_anyway: bool,
    progress: Style,
    redis_url: str | None,
    **sampling: Any,
) -> None:
    """Run all requests of INPUT ("-" reads stdin); run it again to resume.

    INPUT is OpenAI Batch JSONL; JSONL of objects, CSV or Parquet, of which --template makes
    prompts; or plain text, a prompt a line. Sampling options are for rows that do not say.

    Exit codes: 0 all rows are done, 1 some failed, 2 usage, 3 Redis unreachable, 130 interrupted.
    """
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat; add it, or leave --system out.")
    if output is None and not (dry_run or detach):
        raise click.UsageError("--output: missing; say where results go, as in -o results.jsonl.")
    if output is not None and detach:
        raise click.UsageError(
            "--output has no place beside --detach; leave it out, and fetch the results with "
            "omlx-submit results BATCH_ID -o FILE."
        )
    given = {name: value for name, value in sampling.items() if value is not None}
    with open_producer(redis_url) as producer:
        job = Job.of(
            input,
            kind,
            Shape(template, id_field, model, chat, system, given),
            priority=priority,
            window=window,
            job_timeout=job_timeout,
            require_known_model=not queue_anyway,
        )
        if dry_run:
            findings = look_through(producer, job)
            click.echo(json.dumps(findings.as_dict()))
            if findings.bad:
                raise click.exceptions.Exit(JOB_ENDED_BADLY)
        elif detach:
            batch = detach_job(producer, job)
            click.echo(batch.id)
            click.echo("omlx-submit feed, running anywhere, feeds it", err=True)
        elif output is not None:
            with resumable():
                ended = run_job(producer, job, output, ordered=ordered, progress=progress)
            conclude(*ended, output)


@click.command()
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--input", "source", help="The input, where it was stdin or has moved.")
@window_option
@ordered_option
@progress_option
@redis_option
def retry(
    output: Path,
    source: str | None,
    window: int,
    ordered: bool,
    progress: Style,
    redis_url: str | None,
) -> None:
    """Run the rows again that have failed in the run that wrote OUTPUT, and no others."""
    with open_producer(redis_url) as producer:
        settings = read_settings(output)
        if not settings:
            fail(INVALID, f"{run_path(output)}: missing; give the output of an omlx-submit run")
        source = source or settings["input"]
        if source == "-" and sys.stdin.isatty():
            fail(INVALID, f"{output}: its input was stdin; give it with --input")
        with resumable():
            job = Job.from_settings(settings, input=source, window=window)
            ended = run_job(
                producer, job, output, ordered=ordered, only_failures=True, progress=progress
            )
        conclude(*ended, output)


COMMANDS = (run, retry, *batch.COMMANDS)


def conclude(finished: bool, failed: int, output: Path) -> None:
    """End a run with its exit code."""
    if not finished:
        click.echo(f"interrupted; go on with: {command_line()}", err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if failed:
        click.echo(
            f"{failed} rows have failed; run them again: omlx-submit retry {output}", err=True
        )
        raise click.exceptions.Exit(JOB_ENDED_BADLY)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Say how to go on where a run ends too early."""
    try:
        yield
    except (KeyboardInterrupt, RedisError):
        click.echo(f"\nstopped; go on with: {command_line()}", err=True)
        raise
    except OSError as error:
        click.echo(f"stopped; go on with: {command_line()}", err=True)
        fail(JOB_ENDED_BADLY, file_trouble(error))


def command_line() -> str:
    """The command that runs now, without passwords: those of ``--redis-url``, and no other text
    that holds a URL."""
    shown = ["omlx-submit"]
    for argument in sys.argv[1:]:
        option, equals, url = argument.partition("=")
        if shown[-1] == REDIS_OPTION:
            argument = without_password(argument)
        elif option == REDIS_OPTION and equals:
            argument = f"{option}={without_password(url)}"
        shown.append(argument)
    return shlex.join(shown)
