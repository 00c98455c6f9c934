"""omlx-submit run, embed and retry: files of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.options import RunOptions, require_input
from omlx_producer.bulk.progress import Style
from omlx_producer.bulk.run import detach, run_here
from omlx_producer.commands.file_run import (
    FIRST,
    FileRun,
    conclude,
    file_options,
    ordered_option,
    progress_option,
    vector_file_options,
)
from omlx_producer.commands.options import run_options
from omlx_producer.commands.session import open_producer, redis_option, resumable
from omlx_producer.program import INVALID, SectionedCommand, fail, option

queue_anyway_option = option(
    "--queue-anyway",
    section="Request",
    is_flag=True,
    help="Take models that no worker has announced.",
)


@click.command(cls=SectionedCommand, first=(*FIRST, "model", "detached", "redis_url"))
@file_options
@run_options("Request", "model")
@queue_anyway_option
@option(
    "--detach",
    "detached",
    section="Run",
    is_flag=True,
    help="Leave the rows to the workers, and end.",
)
@redis_option
def run(queue_anyway: bool, detached: bool, redis_url: str | None, **values: Any) -> None:
    """Run the requests of INPUT ("-" is stdin), or resume.

    INPUT is OpenAI Batch JSONL; JSONL objects, CSV, TSV or Parquet for --template or with messages;
    prompts, one per line; or a folder of pictures. Names in .gz are unzipped. Sampling options
    apply to rows without them.

    Exit codes: 0 all rows are done, 1 some failed, 2 usage, 3 Redis unreachable, 130 interrupted.
    """
    file = FileRun.of(values | {"require_known_model": not queue_anyway}, detached=detached)
    if file.output is not None and detached:
        raise click.UsageError(
            "--output does not go with --detach; leave it out, and fetch the results with "
            "omlx-submit results BATCH_ID -o FILE"
        )
    with open_producer(redis_url) as producer:
        if detached and file.dry_run is None:
            click.echo(detach(producer, file.options()).id)
        else:
            file.go(producer)


@click.command(cls=SectionedCommand)
@vector_file_options
@run_options("Request", "model")
@queue_anyway_option
@redis_option
def embed(queue_anyway: bool, redis_url: str | None, **values: Any) -> None:
    """Make vectors of the texts of INPUT, or resume.

    INPUT is as for run ("-" is stdin): lines of text, or CSV, TSV, Parquet or JSONL with
    --template or with a prompt. The model is one of embeddings. Errors go to OUTPUT.errors.jsonl.

    Exit codes: as those of run.
    """
    file = FileRun.of(values | {"embed": True, "require_known_model": not queue_anyway})
    with open_producer(redis_url) as producer:
        file.go(producer)


@click.command(cls=SectionedCommand)
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@option("--input", "source", section="Input", help="The input, if it was stdin or has moved.")
@option(
    "--refused",
    section="Run",
    is_flag=True,
    help="Also rows that the worker refused as invalid.",
)
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
        with resumable(source) as turn:
            ended = run_here(
                producer,
                earlier.model_copy(update={"input": source}),
                output,
                ordered=ordered,
                only_failures=True,
                refused_too=refused,
                progress=progress,
                check=turn,
            )
        conclude(ended, output, source)
