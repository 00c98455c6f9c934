"""A whole run: a file of requests in, a file of results out; or all its rows left to Redis."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import click
from pydantic import ConfigDict, TypeAdapter, ValidationError
from redis.exceptions import RedisError

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.collector import DEFAULT_WINDOW, Collector
from omlx_producer.bulk.guard import Guard
from omlx_producer.bulk.journal import keep_copy
from omlx_producer.bulk.live import WorkerWatch
from omlx_producer.bulk.loop import drive
from omlx_producer.bulk.meter import Meter
from omlx_producer.bulk.ordering import balanced
from omlx_producer.bulk.output import (
    OutputFiles,
    errors_path,
    real_path,
    require_output,
    require_own_table,
    results_path,
)
from omlx_producer.bulk.plan import RowIndex, Seen, plan_rows
from omlx_producer.bulk.progress import BadRowReporter, Style, ignored_text, make_display
from omlx_producer.bulk.records import (
    Format,
    Record,
    delimiter_of,
    estimate_rows,
    format_of,
    input_columns,
    open_input,
    read_records,
)
from omlx_producer.bulk.row import REFUSED, RowResult
from omlx_producer.bulk.runfile import RunFile, read_settings, run_path
from omlx_producer.bulk.shape import RowMaker, Shape
from omlx_producer.bulk.table import TableForm, is_table, properties_of
from omlx_producer.client.enqueue import JOB_SECONDS
from omlx_producer.client.models import only_model
from omlx_producer.client.producer import Producer
from omlx_producer.errors import InvalidRequest
from omlx_producer.outage import passes
from omlx_producer.signals import StopSignals
from omlx_producer.terminal import write
from omlx_producer.wire import ModelInfo, Priority, row_job_id
from omlx_producer.wording import counted

# How often a run notes how long it has taken.
SAVE_SECONDS = 30.0
MAX_SHOWN = 60


@dataclass(frozen=True)
class RunOptions:
    """What to run, and how.

    Attributes:
        input: a path, or ``-`` for stdin.
        with_body: add the whole response to a table.
        keep: add the columns of the input to a table.
        csv_safe: see `omlx_producer.bulk.table.TableForm`.
        delimiter: of the cells of a CSV; by default what the name of the input says.
        limit: take only so many rows from the beginning of the input.
        default_model: of rows that name none. A run keeps the one that it began with.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    input: str
    kind: Format
    shape: Shape
    priority: Priority = "bulk"
    window: int = DEFAULT_WINDOW
    job_timeout: int = JOB_SECONDS
    require_known_model: bool = True
    with_body: bool = False
    keep: bool = False
    csv_safe: bool = True
    delimiter: str | None = None
    limit: int | None = None
    default_model: str | None = None

    @classmethod
    def of(cls, name: str, kind: Format | None, shape: Shape, **options: Any) -> RunOptions:
        """Options for an input. Without ``kind``, its name says which format it has.

        Raises:
            InvalidRequest: if there is no such input or no such format.
        """
        kind = kind or format_of(name)
        require_input(name, kind)
        delimiter = options.get("delimiter")
        if delimiter is not None:
            options["delimiter"] = _delimiter(delimiter, kind)
        return cls(name, kind, shape, **options)

    @property
    def settings(self) -> dict[str, Any]:
        """The options in JSON's types, for the run file. The limit is that of one command."""
        name = self.input if self.input == "-" else str(Path(self.input).resolve())
        settings = {**asdict(self), "input": name}
        del settings["limit"]
        return settings

    @classmethod
    def of_run(cls, output: Path) -> RunOptions | None:
        """The options of the run that wrote an output; None if no run did.

        Raises:
            InvalidRequest: if a version with other options wrote them.
        """
        settings = read_settings(output)
        try:
            return None if settings is None else _OPTIONS.validate_python(settings)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise InvalidRequest(
                f"{run_path(output)}: another version of omlx-submit wrote it "
                f"({place or 'settings'}: {error.errors()[0]['msg']}); use that version, or run "
                "with another output"
            ) from None

    def changed(self, earlier: RunOptions) -> list[str]:
        """The options that shape requests and were others in an earlier run, with short values."""
        new, old = ({**asdict(each.shape), **each.shape.sampling} for each in (self, earlier))
        names = sorted((new.keys() | old.keys()) - {"sampling"})
        return [
            name if len(was := repr(old.get(name))) > MAX_SHOWN else f"{name} was {was}"
            for name in names
            if new.get(name) != old.get(name)
        ]

    def row_maker(self, models: Mapping[str, ModelInfo]) -> RowMaker:
        """See `RowMaker` for the errors."""
        return RowMaker(
            self.kind,
            self.shape,
            models,
            require_known_model=self.require_known_model,
            default_model=self.default_model,
        )

    def read(self, stream: IO[bytes]) -> Iterator[Record]:
        """All records of an open input."""
        return read_records(stream, self.kind, self.delimiter or delimiter_of(self.input))

    def records(self, stream: IO[bytes], maker: RowMaker) -> Iterator[Record]:
        """The records to run, of an open input; see `RowMaker.checked` for the errors."""
        return maker.checked(itertools.islice(self.read(stream), self.limit))

    def table_form(self) -> TableForm:
        """The form of a table of this run.

        Raises:
            InvalidRequest: if the columns of the input cannot be read.
        """
        kept: dict[str, Any] = {}
        if self.keep:
            with open_input(self.input) as stream:
                delimiter = self.delimiter or delimiter_of(self.input)
                kept = input_columns(stream, self.kind, delimiter)
        return TableForm(
            self.with_body,
            properties_of(self.shape.sampling.get("response_format")),
            kept,
            self.csv_safe,
        )


def _delimiter(given: str, kind: Format) -> str:
    """The character that an option for the delimiter means.

    Raises:
        InvalidRequest: if it is none, or the input has no cells.
    """
    delimiter = {"tab": "\t", "\\t": "\t"}.get(given.lower(), given)
    if kind != "csv":
        raise InvalidRequest(f"--delimiter: got {given!r}, and the input is no CSV; leave it out")
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise InvalidRequest(f"--delimiter: got {given!r}; give one character, as in ; or tab")
    return delimiter


_OPTIONS = TypeAdapter(RunOptions)


def require_input(name: str, kind: Format) -> None:
    """Check that an input can be opened.

    Raises:
        InvalidRequest: with the remedy.
    """
    if name == "-" and kind == "parquet":
        raise InvalidRequest("-: Parquet cannot be read from stdin; give a file")
    if name != "-" and not Path(name).is_file():
        problem = "is no regular file" if Path(name).exists() else "there is no such file"
        raise InvalidRequest(f"{name}: {problem}; give an input, or - for stdin")


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        finished: False if it was interrupted.
        failures: rows of the output that have failed, in this run or an earlier one, by code. Those
            that the input no longer has do not count.
    """

    finished: bool
    failures: Counter[str]


def run_here(
    producer: Producer,
    options: RunOptions,
    output: Path,
    *,
    ordered: bool = False,
    only_failures: bool = False,
    refused_too: bool = False,
    replace_results: bool = False,
    progress: Style = "auto",
) -> Ended:
    """Run the rows that have no result yet, or only those that failed and may succeed now.

    Args:
        refused_too: with ``only_failures``, run also those that a worker refused.
        replace_results: run with other options than the last run's, and keep a copy of its output.

    Raises:
        InvalidRequest: if input or output cannot be used, or a worker refuses what the options ask
            of every row.
        UnsuitableRedis: if the server would lose jobs.
        redis.exceptions.RedisError: if Redis was away for too long.
        OSError: if a file cannot be read or written.
        KeyboardInterrupt: at the second interrupt.
    """
    output = real_path(output)
    _require_distinct(options, output)
    if options.keep and (options.input == "-" or not is_table(output)):
        raise InvalidRequest(
            f"--keep: adds the columns of a file to a table; give an input other than -, and an "
            f"output in .csv or .parquet in place of {output}"
        )
    require_output(output)
    require_own_table(output)
    producer.require_suitable()
    models, earlier = producer.models(), RunOptions.of_run(output)
    if earlier is not None and earlier.default_model is not None:
        options = replace(options, default_model=earlier.default_model)
    else:
        with contextlib.suppress(InvalidRequest):
            options = replace(options, default_model=only_model(models))
    maker, settings = options.row_maker(models), options.settings
    with contextlib.ExitStack() as stack:
        records = options.records(stack.enter_context(open_input(options.input)), maker)
        run_file = stack.enter_context(RunFile.open(output))
        index = stack.enter_context(contextlib.closing(RowIndex()))
        files = stack.enter_context(contextlib.closing(OutputFiles(output, index)))
        if earlier is not None and not only_failures:
            _say_if_moved(options, earlier, output)
            if (changed := options.changed(earlier)) and index.totals().ok:
                _require_replace(output, changed, replace_results)
        if not only_failures:
            run_file.remember(settings)
        _say_what_is_strange(files)
        seen, meter = Seen(), Meter(total=_estimate(options, index, only_failures))
        meter.ignored = maker.ignored
        rows = plan_rows(
            records,
            maker.make,
            index,
            seen,
            only_failures=only_failures,
            refused_too=refused_too,
        )
        display, reporter = make_display(progress), BadRowReporter(errors_path(output))
        seconds_before = run_file.seconds

        def count(results: list[RowResult]) -> None:
            meter.count(results)
            reporter.report(results)

        def show() -> None:
            watch.look(maker.used, meter, collector.in_flight)
            meter.before = seen.done
            if not only_failures:
                meter.total = max(meter.total or 0, seen.rows) if meter.total else None
            display.update(meter)
            if seconds_before + meter.seconds - run_file.seconds > SAVE_SECONDS:
                run_file.spent(seconds_before + meter.seconds)

        collector = Collector(
            producer.connection,
            run_file.run,
            balanced(rows),
            Guard(files, maker.constraint, proven=index.totals().ok > 0),
            window=options.window,
            priority=options.priority,
            job_timeout=options.job_timeout,
            on_results=count,
            rerun_failures=only_failures,
        )
        signals, watch = (
            StopSignals(),
            WorkerWatch(producer.connection, row_job_id(run_file.run, "")),
        )
        whole, finished = options.limit is None and not only_failures, False
        try:
            with signals.caught():
                finished = drive(collector, signals, show)
                if finished:
                    if only_failures:
                        _require_failed(options, output, seen, index)
                        run_file.remember(settings)
                    _finish(files, options, ordered, index, models)
                    if whole:
                        _sweep(collector)
                    _say_if_empty(options, seen)
        except InvalidRequest:
            with contextlib.suppress(RedisError):
                collector.abandon()
            raise
        finally:
            meter.before = seen.done
            if finished:
                meter.total = None if only_failures else seen.rows
            meter.failed_before = 0 if only_failures else seen.failed
            meter.now = None
            with contextlib.suppress(OSError):
                run_file.spent(seconds_before + meter.seconds)
            if seconds_before:
                meter.overall = (index.totals(), run_file.seconds)
            meter.files = files.rows()
            display.end(meter)
        return Ended(finished, index.failures(seen=options.limit is None))


def detach(producer: Producer, options: RunOptions) -> Batch:
    """Put all rows into a new batch. Rows that can never run have their error at once.

    Raises:
        InvalidRequest: if the input cannot be read.
        UnsuitableRedis: if the server would lose jobs.
        redis.exceptions.RedisError: if Redis does not answer; the batch never runs.
    """
    producer.require_suitable()
    maker = options.row_maker(producer.models())
    with contextlib.closing(RowIndex()) as index, open_input(options.input) as stream:
        records = options.records(stream, maker)
        batch = Batch.create(
            producer.connection,
            priority=options.priority,
            job_timeout=options.job_timeout,
        )
        seen = Seen()
        batch.upload(plan_rows(records, maker.make, index, seen))
        _say_if_empty(options, seen)
    if maker.ignored:
        write(ignored_text(maker.ignored) + "\n", err=True)
    return batch


def _finish(
    files: OutputFiles,
    options: RunOptions,
    ordered: bool,
    index: RowIndex,
    models: Mapping[str, ModelInfo],
) -> None:
    """Write the files as they are at the end of a run."""
    form, whole = options.table_form(), options.limit is None
    if not options.keep:
        files.finish(ordered=ordered, whole=whole, form=form)
        return
    if not whole:
        # Rows beyond the limit, of an earlier run, have their columns too.
        unlimited = replace(options, limit=None)
        with open_input(options.input) as stream:
            maker = unlimited.row_maker(models)
            for _ in plan_rows(unlimited.read(stream), maker.make, index, Seen()):
                pass
    with open_input(options.input) as stream:
        files.finish(ordered=ordered, whole=whole, form=form, source=options.read(stream))


def _say_if_moved(options: RunOptions, earlier: RunOptions, output: Path) -> None:
    if earlier.input != options.settings["input"]:
        click.echo(
            f"{output} keeps its rows of {earlier.input}; for {options.input} alone, give another "
            "output",
            err=True,
        )


def _require_replace(output: Path, changed: list[str], replace_results: bool) -> None:
    """Copy the results of a run with other options, if they may be replaced.

    Raises:
        InvalidRequest: if they may not.
    """
    if not replace_results:
        raise InvalidRequest(
            f"{output}: has results of other options ({', '.join(changed)}); give those again, or "
            "another output, or --replace, which keeps a copy"
        )
    copies = keep_copy(dict.fromkeys([results_path(output), output]))
    write(f"the results so far are kept in {', '.join(map(str, copies))}\n", err=True)


def _say_what_is_strange(files: OutputFiles) -> None:
    """Name what the files of earlier runs hold that no run writes."""
    if files.torn:
        torn = counted(files.torn, "byte")
        click.echo(f"cut off {torn} of a line that a kill or a full disk left unfinished", err=True)
    for path, lines in files.foreign.items():
        click.echo(
            f"{path}: {counted(len(lines), 'line')} of something else, the first of them line "
            f"{lines[0].number}; kept",
            err=True,
        )


def _sweep(collector: Collector) -> None:
    """Delete what earlier runs left behind. What an outage keeps here expires by itself."""
    try:
        collector.sweep()
    except RedisError as error:
        if not passes(error):
            raise


def _say_if_empty(options: RunOptions, seen: Seen) -> None:
    if not seen.rows:
        write(f"{options.input}: holds no rows\n", err=True)


def _require_failed(options: RunOptions, output: Path, seen: Seen, index: RowIndex) -> None:
    """Refuse an input that is not the one whose rows failed.

    Raises:
        InvalidRequest: with the remedy.
    """
    if index.failures() and not seen.failed:
        raise InvalidRequest(
            f"{options.input}: holds none of the rows that failed in {output}; "
            "give the input of that run with --input"
        )


def _require_distinct(options: RunOptions, output: Path) -> None:
    """Refuse an output that is the input.

    Raises:
        InvalidRequest: with the remedy.
    """
    written = {path.resolve() for path in (output, results_path(output), errors_path(output))}
    if options.input != "-" and Path(options.input).resolve() in written:
        raise InvalidRequest(f"{output}: would write over the input; give another output")


def _estimate(options: RunOptions, index: RowIndex, only_failures: bool) -> int | None:
    if only_failures:
        return sum(n for code, n in index.failures().items() if code not in REFUSED)
    if options.input == "-":
        return options.limit
    rows = estimate_rows(options.input, options.kind)
    return rows if options.limit is None else min(rows, options.limit)
