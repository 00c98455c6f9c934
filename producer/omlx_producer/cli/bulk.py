"""omlx-submit run and retry: files of requests."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.dry_run import look_through
from omlx_producer.bulk.options import RunOptions, require_input
from omlx_producer.bulk.progress import STYLES, Style, failure_text
from omlx_producer.bulk.run import Ended, detach, run_here
from omlx_producer.cli.options import (
    given,
    output_option,
    refuse_conflicts,
    run_options,
    sampling_options,
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
@run_options("Input", "template", "format", "delimiter", "id_field", "empty")
@run_options("Request", "model", "raw", "system", "priority")
@option(
    "--queue-anyway",
    section="Request",
    is_flag=True,
    help="Take models that no worker has announced.",
)
@sampling_options
@run_options("Run", "window", "job_timeout", "limit")
@_run(
    "--replace",
    "replace_results",
    is_flag=True,
    help="Run with other options; keeps a copy, OUTPUT.1.",
)
@_run("--dry-run", is_flag=True, help="Check and count all rows; run nothing.")
@_run("--detach", "detached", is_flag=True, help="Leave the rows to the workers, and end.")
@output_option
@ordered_option
@run_options("Output", "with_body", "keep", "csv_safe")
@progress_option
@redis_option
def run(
    input: str,
    output: Path | None,
    ordered: bool,
    dry_run: bool,
    detached: bool,
    queue_anyway: bool,
    replace_results: bool,
    progress: Style,
    redis_url: str | None,
    **asked: Any,
) -> None:
    """Run the requests of INPUT ("-" is stdin), or resume.

    INPUT is OpenAI Batch JSONL; or JSONL objects, CSV, TSV or Parquet for --template or with
    messages; or plain text, one prompt per line. Names that end in .gz are unzipped. Sampling
    options apply to rows that do not set them. Errors go to OUTPUT.errors.jsonl.

    Exit codes: 0 all rows are done, 1 some failed, 2 usage, 3 Redis unreachable, 130 interrupted.
    """
    refuse_conflicts(asked["raw"], asked["system"], asked)
    if output is None and not (dry_run or detached):
        raise click.UsageError("--output: missing; say where results go, as in -o results.jsonl")
    if output is not None and detached:
        raise click.UsageError(
            "--output does not go with --detach; leave it out, and fetch the results with "
            "omlx-submit results BATCH_ID -o FILE"
        )
    if asked["keep"] and (detached or input == "-"):
        raise click.UsageError(
            "--keep needs a file as input, and an output; it reads the input again at the end"
        )
    with open_producer(redis_url) as producer:
        options = RunOptions.of(input, given(asked) | {"require_known_model": not queue_anyway})
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
@option("--input", "source", section="Input", help="The input, if it was stdin or has moved.")
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
        if source is None and earlier.input == "-":
            fail(
                INVALID,
                f"{output}: its input came on stdin; save that in a file, and give --input FILE",
            )
        source = source or earlier.input
        require_input(source, earlier.format)
        with resumable(source):
            ended = run_here(
                producer,
                earlier.model_copy(update={"input": source}),
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
        left = f": {ended.left}" if ended.left else ""
        told = f"{ended.cancelled or 'interrupted'}{left}; continue {with_command(stdin=stdin)}"
        click.echo(told, err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if ended.failures:
        retry = with_command("retry", str(output), *(["--input", "FILE"] if stdin else []))
        save = "save the input in FILE, and " if stdin else ""
        click.echo(failure_text(ended.failures, save, retry), err=True)
        raise click.exceptions.Exit(JOB_ENDED_BADLY)
