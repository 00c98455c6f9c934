"""The files of a run: results as they come in one, errors in the other, nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omlx_producer.bulk.export import export, require_exporter
from omlx_producer.bulk.index import RowIndex
from omlx_producer.bulk.journal import Journal
from omlx_producer.bulk.lines import may_be_ours, read_line, write_line
from omlx_producer.bulk.readers import MAX_LINE_BYTES
from omlx_producer.bulk.row import BadRow, RowResult
from omlx_producer.errors import InvalidRequest

EXPORTED = {".csv", ".parquet"}


def errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors.jsonl")


def require_output(output: Path) -> None:
    """Refuse an output that has no folder, or whose format needs what is not installed.

    Raises:
        InvalidRequest: with the remedy.
    """
    require_exporter(output)
    if not output.parent.is_dir():
        raise InvalidRequest(f"{output}: there is no folder {output.parent}; make it first")


def results_path(output: Path) -> Path:
    """Where results are appended: the output itself, or JSONL beside a CSV or Parquet output."""
    if output.suffix.lower() in EXPORTED:
        return output.with_name(f"{output.name}.jsonl")
    return output


class OutputFiles:
    """The sink of a run on this machine; see `omlx_producer.bulk.sink.Sink`.

    Opening it reads what earlier runs have written into the index: the files alone say what is
    done. The later line of a row counts, and a result counts more than an error.

    Raises:
        InvalidRequest: if the output exists and holds something else.
    """

    def __init__(self, output: Path, index: RowIndex) -> None:
        for path in (results_path(output), errors_path(output)):
            _require_ours(path)
        self._output = output
        self._index = index
        self._results = Journal(results_path(output))
        self._errors = Journal(errors_path(output))
        self._lines = {False: self._load(self._errors), True: self._load(self._results)}

    @property
    def torn(self) -> int:
        """Bytes of lines cut off by a kill, which were removed."""
        return self._results.torn + self._errors.torn

    def commit(self, results: Sequence[RowResult]) -> None:
        """Append the lines of results and return when they are durable."""
        for result in results:
            journal = self._results if result.ok else self._errors
            offset = journal.append(write_line(result))
            self._lines[result.ok] += 1
            row = result.row
            by_line = isinstance(row, BadRow) and row.key.startswith("line:")
            self._index.record(row.key, row.digest, result.ok, offset, by_line=by_line)
        self._results.sync()
        self._errors.sync()

    def finish(self, *, ordered: bool) -> None:
        """Drop the lines that others have replaced, put them in order, export. The input must
        have been read to its end."""
        self._index.forget_absent_lines()
        for ok, journal in ((True, self._results), (False, self._errors)):
            if ordered or self._lines[ok] != self._index.count(ok):
                journal.rewrite(self._index.offsets(ok, in_input_order=ordered))
            else:
                journal.close()
        if self._output != self._results.path:
            export(self._results.path, self._output)

    def close(self) -> None:
        """Leave the files as they are, to be resumed."""
        self._results.close()
        self._errors.close()

    def _load(self, journal: Journal) -> int:
        """Read a file into the index; returns how many lines it has."""
        count = 0
        for offset, line in journal.lines():
            count += 1
            if written := read_line(line):
                self._index.record(
                    written.key, written.digest, written.ok, offset, by_line=written.by_line
                )
        return count


def _require_ours(path: Path) -> None:
    """Keep hands off a file that no run has written: opening it would cut off its last line.

    Raises:
        InvalidRequest: with the remedy.
    """
    if not path.exists():
        return
    with path.open("rb") as stream:
        first = stream.readline(MAX_LINE_BYTES)
    if not may_be_ours(first):
        raise InvalidRequest(
            f"{path}: exists and holds no results of omlx-submit; give another output, "
            "or move it away"
        )
