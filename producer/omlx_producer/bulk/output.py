"""The files of a run: results, errors, and the table made of both."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omlx_producer.bulk.durable import keep_copy, remove_drafts, replacing
from omlx_producer.bulk.records import Record, import_pyarrow, values_of
from omlx_producer.bulk.row import Row, RowResult, job_of_line, read_line
from omlx_producer.bulk.store import (
    Store,
    errors_path,
    is_table,
    read_settings,
    results_path,
    run_path,
)
from omlx_producer.bulk.table import PLAIN, TableForm, write_table
from omlx_producer.bulk.texts import require_no_texts, write_texts
from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import write
from omlx_producer.wire import Constraint, row_job_id

OUTPUT_SUFFIXES = (".jsonl", ".csv", ".parquet")
VECTOR_SUFFIXES = (".jsonl", ".parquet", ".npy")


def real_path(output: Path) -> Path:
    """The file that a link names, so that the files beside it are found by every name.

    Raises:
        InvalidRequest: if it has no name, or the links lead round in a circle.
    """
    if not output.name:
        raise InvalidRequest("output", f"got {str(output)!r}", "give a file")
    if not output.is_symlink():
        return output
    target = Path(os.path.realpath(output))
    if target.is_symlink():
        raise InvalidRequest(
            None, f"{output}: is a link that leads to itself", "give another output"
        )
    return target


def require_output(output: Path, suffixes: Sequence[str] = OUTPUT_SUFFIXES) -> None:
    """Refuse an output that cannot be written.

    Raises:
        InvalidRequest: with the remedy.
    """
    if output.suffix.lower() not in suffixes:
        *others, last = suffixes
        remedy = f"give a file whose name ends in {', '.join(others)} or {last}"
        raise InvalidRequest("output", f"got {str(output)!r}", remedy)
    if output.suffix.lower() == ".parquet":
        import_pyarrow()
    if not output.parent.is_dir():
        raise InvalidRequest(None, f"{output}: there is no folder {output.parent}", "make it first")
    for path in (output, results_path(output), errors_path(output), run_path(output)):
        if path.exists() and not path.is_file():
            raise InvalidRequest(None, f"{path}: is not a regular file", "give another output")


def require_run_output(
    output: Path, source: str, *, keep: bool, vectors: bool = False, each: str | None = None
) -> None:
    """Refuse an output of a run that cannot be written, is the input, or holds something else.

    Args:
        source: the input, a path or ``-``.
        keep: whether the columns of the input are added to a table.
        vectors: whether vectors are written.
        each: the folder of texts, as the record of a run has it.

    Raises:
        InvalidRequest: with the remedy.
    """
    written = (output, results_path(output), errors_path(output))
    if source != "-" and Path(source).resolve() in [path.resolve() for path in written]:
        raise InvalidRequest(None, f"{output}: would write over the input", "give another output")
    if keep and source == "-":
        raise InvalidRequest(
            "keep", "adds the columns of a file to a table", "give the path of a file as rows"
        )
    if keep and output.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidRequest(
            "keep",
            "adds the columns of a file to a table",
            f"give an output in .csv or .parquet in place of {output}",
        )
    require_output(output, VECTOR_SUFFIXES if vectors else OUTPUT_SUFFIXES)
    if each is not None and each != (read_settings(output) or {}).get("each"):
        require_no_texts(Path(each))
    for path in () if run_path(output).exists() else written:
        if path.exists() and path.stat().st_size:
            raise InvalidRequest(
                None,
                f"{path}: exists and is of no run of omlx-submit",
                "give another output, or move it away",
            )


class Output:
    """What a run has on disk: its store, and the files made of it. It is the sink of the run, see
    `omlx_producer.bulk.collector.Sink`.

    Check the path first with `require_run_output`.
    """

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self.errors = errors_path(path)
        self._table_rows = 0
        self._texts: dict[Path, int] = {}

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Output]:
        """Open or make the files. A later run adds to them. See `Store` for the errors."""
        with contextlib.closing(Store(path)) as store:
            yield cls(path, store)

    def commit(self, results: Sequence[RowResult]) -> None:
        """Make results durable."""
        self.store.record(results)

    def finish(
        self,
        *,
        ordered: bool,
        whole: bool = True,
        form: TableForm = PLAIN,
        source: Iterable[Record] = (),
        each: Path | None = None,
    ) -> None:
        """Write table and texts, drop replaced lines, order the rest. Call at the end of the input.

        Args:
            whole: whether the input was read to its end; else errors of lines that it has not
                shown stay.
            form: of the table.
            source: the records of the whole input, if its columns are kept. The table is then in
                the order of the input.
            each: the folder of texts; None for none.
        """
        self.store.forget_stale_errors(whole=whole)
        if is_table(self.path):
            remove_drafts(self.path)
            in_input_order = ordered or bool(form.kept) or self.path.suffix.lower() == ".npy"
            rows = self._rows(in_input_order, iter(source))
            write_table(rows, self.path, form, like=results_path(self.path))
        if each is not None:
            self._texts = {each: write_texts(self._results, each)}
        self.store.rewrite(in_input_order=ordered)

    def rows(self) -> dict[Path, int]:
        """How many rows are in each file, those with rows; table and texts only once written."""
        found = {
            results_path(self.path): self.store.count("results"),
            self.errors: self.store.count("errors"),
        }
        if self._table_rows:
            found = {self.path: self._table_rows, **found}
        return {path: rows for path, rows in (found | self._texts).items() if rows}

    def keep_copy(self) -> None:
        """Copy the results so far beside themselves, and say where."""
        copies = keep_copy(dict.fromkeys([results_path(self.path), self.path]))
        write(f"the results so far are kept in {', '.join(map(str, copies))}\n", err=True)

    def say_gone(self) -> None:
        """Count the rows that the whole input has not shown."""
        if gone := self.store.gone():
            rows = "row of earlier runs is" if gone == 1 else "rows of earlier runs are"
            write(f"{gone} {rows} not in the input any more: kept\n", err=True)

    def _results(self) -> Iterator[dict[str, Any]]:
        """The output lines of results."""
        for known, found in self.store.rows(in_input_order=False):
            if known.done is not None:
                yield found[0]

    def _rows(
        self, ordered: bool, source: Iterator[Record]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """An output line for each row: a result has the error of a later try.

        Each comes with the values of its row in the input, if there is a source and the row is as
        it was when it ran.
        """
        record, changed = next(source, None), 0
        for known, found in self.store.rows(in_input_order=ordered):
            while record and known.line and record.line < known.line:
                record = next(source, None)
            values = values_of(record) if record and record.line == known.line else {}
            if values and not (known.is_done or known.has_failed):
                changed, values = changed + 1, {}
            self._table_rows += 1
            yield found[0] | {"error": found[-1]["error"]}, values
        if changed:
            write(
                f"rows that changed since their answers came: {changed}; their columns of the "
                "input are empty, and the run's command runs them again\n",
                err=True,
            )


class Guard:
    """A sink that ends a run whose options a worker refuses, before it writes any row.

    Once a row has succeeded, a refusal concerns that row.

    Args:
        constraint: that the options give to every row; None for none.
        proven: whether a row has succeeded.
    """

    def __init__(self, output: Output, constraint: Constraint | None, *, proven: bool) -> None:
        self._output = output
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
        self._output.commit(results)

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
    if is_table(output) and output.exists() and not results_path(output).exists():
        raise _not_of_batch(str(output))
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
                document = json.loads(line)
                ok = document["error"] is None
                (good if ok else bad).write(line)
                rows[results if ok else errors] += 1
                yield document, {}

        if is_table(output):
            write_table(kept(), output, form, like=results)
            rows[output] = rows.total()
        else:
            for _ in kept():
                pass
    return dict(rows)
