"""The files of a run: results, errors, and the table made of both."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

from omlx_producer.bulk.journal import Journal, keep_copy, remove_drafts, replacing
from omlx_producer.bulk.plan import RowIndex
from omlx_producer.bulk.records import MAX_LINE_BYTES, Record, import_pyarrow, values_of
from omlx_producer.bulk.row import Row, RowResult, job_of_line, may_be_ours, read_line, write_line
from omlx_producer.bulk.runfile import RunFile
from omlx_producer.bulk.table import PLAIN, TableForm, is_table, write_table
from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import counted, write
from omlx_producer.wire import Constraint, row_job_id

OUTPUT_SUFFIXES = (".jsonl", ".csv", ".parquet")


def real_path(output: Path) -> Path:
    """The file that a link names, so that the files beside it are found by every name.

    Raises:
        InvalidRequest: if the links lead round in a circle.
    """
    if not output.is_symlink():
        return output
    target = Path(os.path.realpath(output))
    if target.is_symlink():
        raise InvalidRequest(
            None, f"{output}: is a link that leads to itself", "give another output"
        )
    return target


def errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors.jsonl")


def require_output(output: Path) -> None:
    """Refuse an output that cannot be written, or whose files hold something else.

    Raises:
        InvalidRequest: with the remedy.
    """
    if output.suffix.lower() not in OUTPUT_SUFFIXES:
        raise InvalidRequest(
            "output",
            f"got {str(output)!r}",
            "give a file whose name ends in .jsonl, .csv or .parquet",
        )
    if output.suffix.lower() == ".parquet":
        import_pyarrow()
    if not output.parent.is_dir():
        raise InvalidRequest(None, f"{output}: there is no folder {output.parent}", "make it first")
    for path in (output, results_path(output), errors_path(output)):
        if path.exists() and not path.is_file():
            raise InvalidRequest(None, f"{path}: is not a regular file", "give another output")
    for path in (results_path(output), errors_path(output)):
        _require_ours(path)


def require_own_table(output: Path) -> None:
    """Refuse a table without the file of results from which a run makes it.

    Raises:
        InvalidRequest: with the remedy.
    """
    if is_table(output) and output.exists() and not results_path(output).exists():
        raise _foreign(output)


def require_run_output(output: Path, source: str, *, keep: bool) -> None:
    """Refuse an output of a run that cannot be written, is the input, or holds something else.

    Args:
        source: the input, a path or ``-``.
        keep: whether the columns of the input are added to a table.

    Raises:
        InvalidRequest: with the remedy.
    """
    written = {path.resolve() for path in (output, results_path(output), errors_path(output))}
    if source != "-" and Path(source).resolve() in written:
        raise InvalidRequest(None, f"{output}: would write over the input", "give another output")
    if keep and (source == "-" or not is_table(output)):
        raise InvalidRequest(
            "keep",
            "adds the columns of a file to a table",
            f"give an input other than -, and an output in .csv or .parquet in place of {output}",
        )
    require_output(output)
    require_own_table(output)


def results_path(output: Path) -> Path:
    """The JSONL file of results: the output itself, or a file beside a table."""
    return output.with_name(f"{output.name}.jsonl") if is_table(output) else output


class ForeignLine(NamedTuple):
    """A line that `write_line` has not written."""

    number: int
    offset: int


class OutputFiles:
    """The sink of a run on this machine; see `omlx_producer.bulk.collector.Sink`.

    Opening it reads the lines of earlier runs into the index: the files alone say what is done. Of
    several lines of a row in one file the last one counts; see `RowIndex.record` for a row in both.
    Check the output first with `require_output`: a file of something else would lose its last line.

    Raises:
        InvalidRequest: if another process writes one of the files.

    Attributes:
        foreign: the places of lines that are nobody's result, by file. They are kept.
    """

    def __init__(self, output: Path, index: RowIndex) -> None:
        self._output = output
        self._index = index
        self._results = Journal(results_path(output), like=output)
        self._errors = Journal(errors_path(output), like=results_path(output))
        self._table_rows = 0
        self.foreign: dict[Path, list[ForeignLine]] = {}
        self._lines = {False: self._load(self._errors), True: self._load(self._results)}

    @property
    def torn(self) -> int:
        """Bytes of torn lines that were cut off."""
        return self._results.torn + self._errors.torn

    def rows(self) -> dict[Path, int]:
        """How many rows are in each file, those with rows; the table only once it is written."""
        totals = self._index.totals()
        found = {self._results.path: totals.ok, self._errors.path: totals.failed}
        if self._table_rows:
            found = {self._output: self._table_rows, **found}
        return {path: rows for path, rows in found.items() if rows}

    def commit(self, results: Sequence[RowResult]) -> None:
        """Append the lines of results; returns when they are durable."""
        for result in results:
            journal = self._results if result.ok else self._errors
            offset = journal.append(write_line(result))
            self._lines[result.ok] += 1
            self._index.record(result.written, offset)
        self._results.sync()
        self._errors.sync()

    def finish(
        self,
        *,
        ordered: bool,
        whole: bool = True,
        form: TableForm = PLAIN,
        source: Iterable[Record] = (),
    ) -> None:
        """Write the table, drop replaced lines, order the others. Call at the end of the input.

        Foreign lines stay, after the others where these are ordered or dropped.

        Args:
            whole: whether the input was read to its end; else errors of lines that it has not
                shown stay.
            form: of the table.
            source: the records of the whole input, if its columns are kept. The table is then in
                the order of the input.
        """
        if whole:
            self._index.forget_absent_lines()
        if is_table(self._output):
            remove_drafts(self._output)
            rows = self._current(ordered or bool(form.kept), iter(source))
            write_table(rows, self._output, form, like=self._results.path)
        totals = self._index.totals()
        for ok, journal in ((True, self._results), (False, self._errors)):
            foreign = [line.offset for line in self.foreign.get(journal.path, ())]
            current = (totals.ok if ok else totals.failed) + len(foreign)
            if ordered or self._lines[ok] != current:
                places = self._index.places(in_input_order=ordered)
                offsets = (place.result if ok else place.error for place in places)
                kept = (offset for offset in offsets if offset is not None)
                journal.rewrite(itertools.chain(kept, foreign))
            else:
                journal.close()

    def close(self) -> None:
        """Close the files as they are; a later run resumes."""
        try:
            self._results.close()
        finally:
            self._errors.close()

    def _current(
        self, ordered: bool, source: Iterator[Record]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The output lines that count, one for each row: a result with the error of a later try.

        Each comes with the values of its row in the input, if there is a source.
        """
        record = next(source, None)
        with self._results.path.open("rb") as good, self._errors.path.open("rb") as bad:
            for place in self._index.places(in_input_order=ordered):
                found = [
                    _line_at(stream, offset)
                    for stream, offset in ((good, place.result), (bad, place.error))
                    if offset is not None
                ]
                while record and place.line and record.line < place.line:
                    record = next(source, None)
                values = values_of(record) if record and record.line == place.line else {}
                self._table_rows += 1
                yield found[0] | {"error": found[-1]["error"]}, values

    def _load(self, journal: Journal) -> int:
        """Read a file into the index; returns how many lines it has."""
        count = 0
        for offset, line in journal.lines():
            count += 1
            if written := read_line(line):
                self._index.record(written, offset)
            else:
                self.foreign.setdefault(journal.path, []).append(ForeignLine(count, offset))
        return count


def _line_at(stream: IO[bytes], offset: int) -> dict[str, Any]:
    stream.seek(offset)
    document: dict[str, Any] = json.loads(stream.readline())
    return document


def _require_ours(path: Path) -> None:
    """Refuse a file that exists and holds something else than output lines.

    Raises:
        InvalidRequest: with the remedy.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        first = stream.readline(MAX_LINE_BYTES)
    if not may_be_ours(first):
        raise _foreign(path)


def _foreign(path: Path) -> InvalidRequest:
    return InvalidRequest(
        None,
        f"{path}: exists and holds no results of omlx-submit",
        "give another output, or move it away",
    )


@dataclass
class Output:
    """What a run has on disk: its files, the index of their rows, and the run file, locked."""

    path: Path
    run_file: RunFile
    index: RowIndex
    files: OutputFiles

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Output]:
        """See `RunFile.open` and `OutputFiles` for the errors; check the path first."""
        with (
            RunFile.open(path) as run_file,
            contextlib.closing(RowIndex()) as index,
            contextlib.closing(OutputFiles(path, index)) as files,
        ):
            yield cls(path, run_file, index, files)

    def keep_copy(self) -> None:
        """Copy the results so far beside themselves, and say where."""
        copies = keep_copy(dict.fromkeys([results_path(self.path), self.path]))
        write(f"the results so far are kept in {', '.join(map(str, copies))}\n", err=True)

    def say_what_is_strange(self) -> None:
        """Name what the files of earlier runs hold that no run writes."""
        if self.files.torn:
            torn = counted(self.files.torn, "byte")
            click.echo(
                f"cut off {torn} of a line that a kill or a full disk left unfinished", err=True
            )
        for path, lines in self.files.foreign.items():
            click.echo(
                f"{path}: {counted(len(lines), 'line')} of something else, the first of them line "
                f"{lines[0].number}; kept",
                err=True,
            )


class Guard:
    """A sink that ends a run whose options a worker refuses, before it writes any row.

    Once a row has succeeded, a refusal concerns that row.

    Args:
        constraint: that the options give to every row; None for none.
        proven: whether a row has succeeded.
    """

    def __init__(self, files: OutputFiles, constraint: Constraint | None, *, proven: bool) -> None:
        self._files = files
        self._constraint = constraint
        self._proven = proven or constraint is None

    def commit(self, results: Sequence[RowResult]) -> None:
        """Write results to the files.

        Raises:
            InvalidRequest: the first refusal.
        """
        if not self._proven:
            self._proven = any(result.ok for result in results)
        if not self._proven:
            for result in results:
                if self._is_refused(result):
                    got = result.reason.removeprefix(f"{result.field}: ")
                    raise InvalidRequest(result.field, got)
        self._files.commit(results)

    def _is_refused(self, result: RowResult) -> bool:
        return (
            result.code == "invalid_request"
            and isinstance(result.row, Row)
            and result.row.request.constraint == self._constraint
            and result.field.startswith(("response_format", "structured_outputs"))
        )


def require_batch_output(output: Path, run: str, lines: Iterable[bytes]) -> None:
    """Refuse an output that has lines of something else than this batch; they would be replaced.

    Args:
        run: the id of the batch's run.
        lines: of the batch, read if the output has errors, which do not say where they are from.

    Raises:
        InvalidRequest: with the remedy.
    """
    errors: dict[str, str] = {}
    for path in (results_path(output), errors_path(output)):
        if not path.exists():
            continue
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                place, written = f"{path}: line {number}", read_line(line)
                if written is not None and not written.ok:
                    errors.setdefault(written.digest, place)
                elif written is None or not job_of_line(line).startswith(row_job_id(run, "")):
                    raise _not_of_batch(place)
    if errors:
        for line in lines:
            if written := read_line(line):
                errors.pop(written.digest, None)
    for place in errors.values():
        raise _not_of_batch(place)


def _not_of_batch(place: str) -> InvalidRequest:
    return InvalidRequest(
        None,
        f"{place} is no result of this batch and would be lost",
        "give another output, or move the file away",
    )


def write_results(lines: Iterable[bytes], output: Path, form: TableForm) -> dict[Path, int]:
    """Write the output lines of a batch into the files that a run on this machine has.

    Args:
        form: of a table.

    Returns:
        How many rows are in each file.

    Raises:
        OSError: if a file cannot be written.
    """
    results, errors = results_path(output), errors_path(output)
    rows: Counter[Path] = Counter()
    with replacing(results, like=output) as good, replacing(errors, like=results) as bad:

        def kept() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
            for line in lines:
                written = read_line(line)
                ok = written is not None and written.ok
                (good if ok else bad).write(line)
                rows[results if ok else errors] += 1
                yield json.loads(line), {}

        if is_table(output):
            write_table(kept(), output, form, like=results)
            rows[output] = rows.total()
        else:
            for _ in kept():
                pass
    return dict(rows)
