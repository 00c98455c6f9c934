"""omlx-submit run and retry: files of requests."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.dry_run import look_through
from omlx_producer.bulk.options import RunOptions, require_input
from omlx_producer.bulk.progress import STYLES, Style, failure_text
from omlx_producer.bulk.records import FORMATS, Format
from omlx_producer.bulk.run import Ended, detach, run_here
from omlx_producer.bulk.shape import EMPTY, Empty, Shape
from omlx_producer.cli.options import (
    csv_safe_option,
    given,
    model_option,
    output_option,
    refuse_conflicts,
    sampling_options,
    with_body_option,
)
from omlx_producer.cli.session import open_producer, redis_option, resumable, with_command
from omlx_producer.program import (
    INTERRUPTED,
    INVALID,
    JOB_ENDED_BADLY,
    SectionedCommand,
    fail,
    option,
)
from omlx_producer.wire import PRIORITIES, Priority

_input = partial(option, section="Input")
_request = partial(option, section="Request")
_run = partial(option, section="Run")

progress_option = option(
    "--progress",
    section="Output",
    type=click.Choice(STYLES),
    default="auto",
    help="On stderr; auto is a bar on a terminal, else ndjson.",
)
ordered_option = option(
    "--ordered", section="Output", is_flag=True, help="Sort the results by input at the end."
)


@click.command(cls=SectionedCommand)
@click.argument("input")
@_input("--template", help='Make prompts of fields, as in "Summarise: {text}".')
@_input(
    "--format",
    "kind",
    type=click.Choice(FORMATS),
    help="The format of INPUT; by default its suffix.",
)
@_input("--delimiter", metavar="TEXT", help="Between a CSV's cells; its first line tells ; , tab.")
@_input("--id-field", metavar="NAME", help="Holds the custom_id; else custom_id or id does.")
@_input("--empty", type=click.Choice(EMPTY), help="What becomes of rows with empty fields.")
@model_option("Run all rows on this model, whatever they name.")
@_request("--raw", is_flag=True, help="Send texts as bare prompts, not as user messages.")
@_request("--system", metavar="TEXT", help="A system message before each.")
@_request("--priority", type=click.Choice(PRIORITIES), default="bulk", help="Queue of the rows.")
@_request("--queue-anyway", is_flag=True, help="Take models that no worker has announced.")
@sampling_options
@_run(
    "--window",
    type=click.IntRange(min=1),
    default=RunOptions.window,
    help="Rows in Redis at once, at most.",
)
@_run(
    "--job-timeout",
    type=click.IntRange(min=1),
    default=RunOptions.job_timeout,
    help="Seconds a row may run.",
)
@_run(
    "--replace",
    "replace_results",
    is_flag=True,
    help="Run with other options; keeps a copy, OUTPUT.1.",
)
@_run("--limit", type=click.IntRange(min=1), help="Take the first rows only, this many.")
@_run("--dry-run", is_flag=True, help="Check and count all rows; run nothing.")
@_run("--detach", "detached", is_flag=True, help="Leave the rows to the workers, and end.")
@output_option
@ordered_option
@with_body_option
@option("--keep", section="Output", is_flag=True, help="Add the input's columns to a table.")
@csv_safe_option
@progress_option
@redis_option
def run(
    input: str,
    output: Path | None,
    template: str | None,
    kind: Format | None,
    id_field: str | None,
    empty: Empty | None,
    model: str | None,
    raw: bool,
    system: str | None,
    window: int,
    ordered: bool,
    priority: Priority,
    job_timeout: int,
    limit: int | None,
    dry_run: bool,
    detached: bool,
    queue_anyway: bool,
    replace_results: bool,
    with_body: bool,
    keep: bool,
    csv_safe: bool,
    delimiter: str | None,
    progress: Style,
    redis_url: str | None,
    **sampling: Any,
) -> None:
    """Run the requests of INPUT ("-" is stdin), or resume.

    INPUT is OpenAI Batch JSONL; or JSONL objects, CSV, TSV or Parquet for --template or with
    messages; or plain text, one prompt per line. Names that end in .gz are unzipped. Sampling
    options apply to rows that do not set them. Errors go to OUTPUT.errors.jsonl.

    Exit codes: 0 all rows are done, 1 some failed, 2 usage, 3 Redis unreachable, 130 interrupted.
    """
    refuse_conflicts(raw, system, sampling)
    if output is None and not (dry_run or detached):
        raise click.UsageError("--output: missing; say where results go, as in -o results.jsonl.")
    if output is not None and detached:
        raise click.UsageError(
            "--output does not go with --detach; leave it out, and fetch the results with "
            "omlx-submit results BATCH_ID -o FILE."
        )
    if keep and (detached or input == "-"):
        raise click.UsageError(
            "--keep needs a file as input, and an output; it reads the input again at the end."
        )
    with open_producer(redis_url) as producer:
        options = RunOptions.of(
            input,
            kind,
            Shape(template, id_field, model, raw, system, given(sampling), empty),
            priority=priority,
            window=window,
            job_timeout=job_timeout,
            require_known_model=not queue_anyway,
            with_body=with_body,
            keep=keep,
            csv_safe=csv_safe,
            delimiter=delimiter,
            limit=limit,
        )
        if dry_run:
            findings = look_through(options, producer.models())
            click.echo(json.dumps(findings.as_dict()))
            if findings.bad:
                raise click.exceptions.Exit(JOB_ENDED_BADLY)
        elif detached:
            batch = detach(producer, options)
            click.echo(batch.id)
        elif output is not None:
            with resumable(input):
                ended = run_here(
                    producer,
                    options,
                    output,
                    ordered=ordered,
                    replace_results=replace_results,
                    progress=progress,
                )
            conclude(ended, output, input)


@click.command(cls=SectionedCommand)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@_input("--input", "source", help="The input, if it was stdin or has moved.")
@_run("--refused", is_flag=True, help="Also rows that the worker refused as invalid.")
@ordered_option
@progress_option
@redis_option
def retry(
    output: Path,
    source: str | None,
    refused: bool,
    ordered: bool,
    progress: Style,
    redis_url: str | None,
) -> None:
    """Run the failed rows of the run that wrote OUTPUT again.

    Rows whose requests were refused run only once they are corrected in the input, or with
    --refused.
    """
    with open_producer(redis_url) as producer:
        earlier = RunOptions.to_retry(output)
        source = source or earlier.input
        if source == "-" and (sys.stdin is None or sys.stdin.isatty()):
            fail(
                INVALID,
                f"{output}: its input came on stdin; save that in a file, and give --input FILE",
            )
        require_input(source, earlier.kind)
        with resumable(source):
            ended = run_here(
                producer,
                dataclasses.replace(earlier, input=source),
                output,
                ordered=ordered,
                only_failures=True,
                refused_too=refused,
                progress=progress,
            )
        conclude(ended, output, source)


def conclude(ended: Ended, output: Path, source: str) -> None:
    """End a run of an input with its exit code, and say how to continue."""
    stdin = source == "-"
    if not ended.finished:
        click.echo(
            f"{ended.cancelled or 'interrupted'}; continue {with_command(stdin=stdin)}", err=True
        )
        raise click.exceptions.Exit(INTERRUPTED)
    if ended.failures:
        retry = with_command("retry", str(output), *(["--input", "FILE"] if stdin else []))
        save = "save the input in FILE, and " if stdin else ""
        click.echo(failure_text(ended.failures, save, retry), err=True)
        raise click.exceptions.Exit(JOB_ENDED_BADLY)
