"""A run on this machine: a file of requests in, a file of results out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import click
from redis.exceptions import RedisError

from omlx_producer.bulk.driving import Interrupts, drive
from omlx_producer.bulk.index import RowIndex
from omlx_producer.bulk.making import RowMaker, Shape
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.ordering import balanced
from omlx_producer.bulk.output import OutputFiles, errors_path, require_output, results_path
from omlx_producer.bulk.planning import Plan, plan_rows
from omlx_producer.bulk.progress import Style, make_display
from omlx_producer.bulk.readers import Format, estimate_rows, format_of, read_records
from omlx_producer.bulk.row import BadRow, RowResult
from omlx_producer.bulk.runfile import RunFile
from omlx_producer.bulk.runner import Runner
from omlx_producer.bulk.window import DEFAULT_WINDOW
from omlx_producer.client import Producer
from omlx_producer.enqueue import JOB_SECONDS
from omlx_producer.errors import InvalidRequest
from omlx_producer.protocol import Priority
from omlx_producer.trouble import passes

SHOWN_BAD_ROWS = 20


@dataclass(frozen=True)
class Job:
    """What to run and how; what a run file keeps of it is `settings`.

    Attributes:
        input: a path, or ``-`` for stdin.
    """

    input: str
    kind: Format
    shape: Shape
    priority: Priority = "bulk"
    window: int = DEFAULT_WINDOW
    job_timeout: int = JOB_SECONDS
    require_known_model: bool = True

    @classmethod
    def of(cls, name: str, kind: Format | None, shape: Shape, **options: Any) -> Job:
        """A job on an input, whose format its name says unless it is given.

        Raises:
            InvalidRequest: if there is no such input or no such format.
        """
        kind = kind or format_of(name)
        if name == "-" and kind == "parquet":
            raise InvalidRequest("-: Parquet can not be read from stdin; give a file")
        if name != "-" and not Path(name).is_file():
            raise InvalidRequest(f"{name}: there is no such file; give an input, or - for stdin")
        return cls(name, kind, shape, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """What `from_settings` makes the job from again, in JSON's types."""
        name = self.input if self.input == "-" else str(Path(self.input).resolve())
        return {**asdict(self), "input": name}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], **changes: Any) -> Job:
        known = {**settings, **changes}
        shape = Shape(**known.pop("shape"))
        return cls.of(known.pop("input"), known.pop("kind"), shape, **known)


@contextlib.contextmanager
def open_input(name: str) -> Iterator[IO[bytes]]:
    """An input as bytes; stdin stays open."""
    if name == "-":
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as stream:
        yield stream


def run_job(
    producer: Producer,
    job: Job,
    output: Path,
    *,
    ordered: bool = False,
    only_failures: bool = False,
    progress: Style = "auto",
) -> tuple[bool, int]:
    """Run a job, or what is missing of it.

    Returns:
        whether it went to its end (False: interrupted), and how many rows of the output have
        failed, in this run or an earlier one.

    Raises:
        InvalidRequest: if input or output can not be what they are meant to be.
        redis.exceptions.RedisError: if Redis was away for too long.
        OSError: if a file can not be read or written.
        KeyboardInterrupt: at the second interrupt.
    """
    require_output(output)
    _keep_input(job, output)
    maker = RowMaker(
        job.kind, job.shape, producer.models(), require_known_model=job.require_known_model
    )
    with (
        RunFile.open(output) as run_file,
        contextlib.closing(RowIndex()) as index,
        contextlib.closing(OutputFiles(output, index)) as files,
        open_input(job.input) as stream,
    ):
        if run_file.settings != job.settings:
            run_file.settings = job.settings
            run_file.save()
        if files.torn:
            click.echo(f"cut off {files.torn} bytes of a line that a kill had torn", err=True)
        plan, meter = Plan(), Meter(total=_estimate(job, index, only_failures))
        records = read_records(stream, job.kind)
        rows = plan_rows(records, maker.make, index, plan, only_failures=only_failures)
        display, reporter = make_display(progress), BadRowReporter(errors_path(output))

        def count(results: list[RowResult]) -> None:
            meter.count(results)
            reporter.report(results)

        def show() -> None:
            meter.before = plan.done
            if not only_failures:
                meter.total = max(meter.total or 0, plan.rows) if meter.total else None
            display.update(meter)

        runner = Runner(
            producer.connection,
            run_file.run,
            balanced(rows),
            files,
            window=job.window,
            priority=job.priority,
            job_timeout=job.job_timeout,
            on_results=count,
            rerun_failures=only_failures,
        )
        interrupts = Interrupts()
        try:
            with interrupts.caught():
                finished = drive(runner, interrupts, show)
                if finished:
                    files.finish(ordered=ordered)
                    if not only_failures:
                        _sweep(runner)
        finally:
            meter.before, meter.total = plan.done, None if only_failures else plan.rows
            display.end(meter)
        return finished, index.count(ok=False)


def _sweep(runner: Runner) -> None:
    """Let go of what earlier runs have left; what an outage keeps from it expires by itself."""
    try:
        runner.sweep()
    except RedisError as error:
        if not passes(error):
            raise


class BadRowReporter:
    """Says which lines of the input are bad, the first few of them."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._count = 0

    def report(self, results: list[RowResult]) -> None:
        for row in (result.row for result in results):
            if not isinstance(row, BadRow):
                continue
            self._count += 1
            if self._count <= SHOWN_BAD_ROWS:
                click.echo(row.reason, err=True)
            elif self._count == SHOWN_BAD_ROWS + 1:
                click.echo(f"more bad lines are in {self._errors}", err=True)


def _keep_input(job: Job, output: Path) -> None:
    """Refuse an output that is the input.

    Raises:
        InvalidRequest: with the remedy.
    """
    written = {path.resolve() for path in (output, results_path(output), errors_path(output))}
    if job.input != "-" and Path(job.input).resolve() in written:
        raise InvalidRequest(f"{output}: would write over the input; give another output")


def _estimate(job: Job, index: RowIndex, only_failures: bool) -> int | None:
    if only_failures:
        return index.count(ok=False)
    return None if job.input == "-" else estimate_rows(Path(job.input), job.kind)
