"""A file of requests, as a command runs it: its options, the run, and how that ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.dry_run import estimate_lacks, has_rows_left, look_through
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.progress import STYLES, Style, failure_text
from omlx_producer.bulk.run import Ended, run_here
from omlx_producer.bulk.trial import Trial, try_rows
from omlx_producer.commands.options import (
    given,
    output_option,
    refuse_conflicts,
    run_options,
    sampling_options,
    vector_option,
)
from omlx_producer.commands.session import resumable, with_command
from omlx_producer.producer import Producer
from omlx_producer.program import INTERRUPTED, JOB_ENDED_BADLY, option
from omlx_producer.terminal import one_cell, write

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

FIRST = (
    *("template", "image", "format", "system", "max_completion_tokens", "temperature"),
    *("response_format", "choice", "limit", "dry_run", "output", "keep"),
)
"""The options of a run that most users need."""

_INPUT = (
    click.argument("input"),
    run_options("Input", "template", "format", "delimiter", "id_field", "empty"),
)
_PICTURES = run_options("Input", "image")
_RUN = (
    run_options("Run", "window", "job_timeout", "limit"),
    _run(
        "--replace",
        "replace_results",
        is_flag=True,
        help="Run with other options; keeps a copy, OUTPUT.1.",
    ),
    _run(
        "--dry-run",
        is_flag=False,
        flag_value=0,
        type=click.IntRange(0),
        metavar="[N]",
        help="Check all rows; try N, also without a schema; estimate all.",
    ),
)
_OPTIONS = (
    *_INPUT,
    _PICTURES,
    run_options("Request", "raw", "system", "priority"),
    sampling_options,
    *_RUN,
    output_option(),
    ordered_option,
    run_options("Output", "with_body", "keep", "each", "csv_safe"),
    progress_option,
)
_VECTOR_OPTIONS = (
    *_INPUT,
    vector_option,
    run_options("Request", "priority"),
    *_RUN,
    output_option("Vectors (.parquet, .npy, .jsonl); errors beside them."),
    ordered_option,
    run_options("Output", "keep"),
    progress_option,
)


def file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add INPUT and the options of a `FileRun`."""
    return _decorated(command, _OPTIONS)


def vector_file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add INPUT and the options of a `FileRun` that makes vectors."""
    return _decorated(command, _VECTOR_OPTIONS)


def _decorated(command: Callable[..., Any], options: Sequence[Any]) -> Callable[..., Any]:
    for decorate in reversed(options):
        command = decorate(command)
    return command


@dataclass(frozen=True)
class FileRun:
    """A run as `file_options` describe it.

    Attributes:
        dry_run: how many rows are tried in place of a run; None for a run.
        asked: options of the run and fields of its requests, by name; None where not given.
    """

    input: str
    output: Path | None
    ordered: bool
    dry_run: int | None
    replace_results: bool
    progress: Style
    asked: dict[str, Any]

    @classmethod
    def of(cls, values: dict[str, Any], *, detached: bool = False) -> FileRun:
        """The run of these values of `file_options`.

        Raises:
            click.UsageError: if they do not go together.
        """
        own = cls.__dataclass_fields__.keys() & values.keys()
        asked = {name: value for name, value in values.items() if name not in own}
        made = cls(**{name: values[name] for name in own}, asked=asked)
        if not asked.get("embed"):
            refuse_conflicts(asked["raw"], asked["system"], asked)
        if made.output is None and made.dry_run is None and not detached:
            raise click.UsageError(
                "--output: missing; say where results go, as in -o results.jsonl"
            )
        if made.dry_run and made.input == "-":
            raise click.UsageError("--dry-run N reads the input twice; save stdin in a file")
        if asked["keep"] and (detached or made.input == "-"):
            raise click.UsageError(
                "--keep needs a file as input, and an output; it reads the input again at the end"
            )
        if asked.get("each") is not None and detached:
            raise click.UsageError("--each needs an output; leave it out, or --detach")
        return made

    def options(self) -> RunOptions:
        """See `RunOptions.of` for the errors."""
        return RunOptions.of(self.input, given(self.asked))

    def needs_worker(self, producer: Producer) -> bool:
        """Whether rows are to run. What can be refused before that is refused; see `run_here`."""
        options = self.options()
        if self.dry_run is not None:
            return self.dry_run > 0 and has_rows_left(producer, options)
        return has_rows_left(producer, options, self.output, replace_results=self.replace_results)

    def go(
        self,
        producer: Producer,
        before_retry: str = "",
        check: Callable[[], object] | None = None,
    ) -> None:
        """Run, and end the command with an exit code other than 0 if rows failed or are left.

        Args:
            before_retry: what to do before failed rows are tried again, in words that ``and``
                follows.
            check: see `Driver`.
        """
        options = self.options()
        if self.dry_run is not None:
            self._try(producer, options, self.dry_run, check)
        elif self.output is not None:
            with resumable(self.input, check) as turn:
                ended = run_here(
                    producer,
                    options,
                    self.output,
                    ordered=self.ordered,
                    replace_results=self.replace_results,
                    progress=self.progress,
                    check=turn,
                )
            conclude(ended, self.output, self.input, before_retry)

    def _try(
        self, producer: Producer, options: RunOptions, rows: int, check: Callable[[], object] | None
    ) -> None:
        """Look through the input, and run this many rows of it without an output."""
        findings, trial = look_through(options, producer.models()), Trial()
        found = findings.as_dict()
        lacks, served = estimate_lacks(producer.connection, findings.models)
        if lacks:
            write(f"{lacks}\n", err=True)
        if rows and served:
            trial = try_rows(producer, options, rows, self.progress, check)
            good = findings.rows - findings.bad.total()
            write("".join(f"{one_cell(answer)}\n" for answer in trial.answers), err=True)
            write(f"{trial.told(good)}\n", err=True)
            found["trial"] = trial.as_dict(good)
        click.echo(json.dumps(found))
        if findings.bad or trial.failed or (rows and not served):
            raise click.exceptions.Exit(JOB_ENDED_BADLY)


def conclude(ended: Ended, output: Path, source: str, before_retry: str = "") -> None:
    """End a run of an input with its exit code, and say how to continue."""
    stdin = source == "-"
    if not ended.finished:
        left = f": {ended.left}" if ended.left else ""
        told = f"{ended.cancelled or 'interrupted'}{left}; continue {with_command(stdin=stdin)}"
        click.echo(told, err=True)
        raise click.exceptions.Exit(INTERRUPTED)
    if ended.failures:
        retry = with_command("retry", str(output), *(["--input", "FILE"] if stdin else []))
        steps = [step for step in (before_retry, "save the input in FILE" if stdin else "") if step]
        needs = "".join(f"{step}, and " for step in steps)
        click.echo(failure_text(ended.failures, needs, retry), err=True)
        raise click.exceptions.Exit(JOB_ENDED_BADLY)
