"""The files of a run: results, errors, and the table made of both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from omlx_producer.bulk.journal import Journal, remove_drafts, replacing
from omlx_producer.bulk.plan import RowIndex
from omlx_producer.bulk.records import MAX_LINE_BYTES, import_pyarrow
from omlx_producer.bulk.row import RowResult, may_be_ours, read_line, write_line
from omlx_producer.bulk.table import is_table, write_table
from omlx_producer.errors import InvalidRequest


def real_path(output: Path) -> Path:
    """The file that a link names, so that the files beside it are found by every name.

    Raises:
        InvalidRequest: if the links lead round in a circle.
    """
    if not output.is_symlink():
        return output
    target = Path(os.path.realpath(output))
    if target.is_symlink():
        raise InvalidRequest(f"{output}: is a link that leads to itself; give another output")
    return target


def errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors.jsonl")


def require_output(output: Path) -> None:
    """Refuse an output that cannot be written, or whose files hold something else.

    Raises:
        InvalidRequest: with the remedy.
    """
    if output.suffix.lower() == ".parquet":
        import_pyarrow()
    if not output.parent.is_dir():
        raise InvalidRequest(f"{output}: there is no folder {output.parent}; make it first")
    for path in (output, results_path(output), errors_path(output)):
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{path}: is not a regular file; give another output")
    for path in (results_path(output), errors_path(output)):
        _require_ours(path)


def require_own_table(output: Path) -> None:
    """Refuse a table without the file of results from which a run makes it.

    Raises:
        InvalidRequest: with the remedy.
    """
    if is_table(output) and output.exists() and not results_path(output).exists():
        raise _foreign(output)


def results_path(output: Path) -> Path:
    """The JSONL file of results: the output itself, or a file beside a table."""
    return output.with_name(f"{output.name}.jsonl") if is_table(output) else output


class OutputFiles:
    """The sink of a run on this machine; see `omlx_producer.bulk.feed.Sink`.

    Opening it reads the lines of earlier runs into the index: the files alone say what is done. Of
    several lines of a row the last one counts, and a result counts more than an error. Check the
    output first with `require_output`: a file of something else would lose its last line.

    Raises:
        InvalidRequest: if another process writes one of the files.
    """

    def __init__(self, output: Path, index: RowIndex) -> None:
        self._output = output
        self._index = index
        self._results = Journal(results_path(output), like=output)
        self._errors = Journal(errors_path(output), like=results_path(output))
        self._lines = {False: self._load(self._errors), True: self._load(self._results)}

    @property
    def torn(self) -> int:
        """Bytes of torn lines that were cut off."""
        return self._results.torn + self._errors.torn

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
        with_body: bool = False,
        properties: Sequence[str] = (),
    ) -> None:
        """Write the table, drop replaced lines, order the others. Call at the end of the input.

        Args:
            whole: whether the input was read to its end; else errors of lines that it has not
                shown stay.
            with_body, properties: see `write_table`.
        """
        if whole:
            self._index.forget_absent_lines()
        if is_table(self._output):
            lines = self._current(ordered)
            remove_drafts(self._output)
            write_table(
                lines,
                self._output,
                like=self._results.path,
                with_body=with_body,
                properties=properties,
            )
        for ok, journal in ((True, self._results), (False, self._errors)):
            if ordered or self._lines[ok] != self._index.count(ok):
                places = self._index.places(in_input_order=ordered)
                journal.rewrite(offset for kind, offset in places if kind == ok)
            else:
                journal.close()

    def close(self) -> None:
        """Close the files as they are; a later run resumes."""
        try:
            self._results.close()
        finally:
            self._errors.close()

    def _current(self, ordered: bool) -> Iterator[bytes]:
        """The lines that count, of both files."""
        with self._results.path.open("rb") as good, self._errors.path.open("rb") as bad:
            for ok, offset in self._index.places(in_input_order=ordered):
                stream = good if ok else bad
                stream.seek(offset)
                yield stream.readline()

    def _load(self, journal: Journal) -> int:
        """Read a file into the index; returns how many lines it has."""
        count = 0
        for offset, line in journal.lines():
            count += 1
            if written := read_line(line):
                self._index.record(written, offset)
        return count


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
        f"{path}: exists and holds no results of omlx-submit; give another output, or move it away"
    )


def write_results(
    lines: Iterable[bytes], output: Path, *, with_body: bool, properties: Sequence[str] = ()
) -> None:
    """Write the output lines of a batch into the files that a run on this machine has.

    Args:
        with_body, properties: see `write_table`.

    Raises:
        OSError: if a file cannot be written.
    """
    output = real_path(output)
    results = results_path(output)
    with (
        replacing(results, like=output) as good,
        replacing(errors_path(output), like=results) as bad,
    ):

        def kept() -> Iterator[bytes]:
            for line in lines:
                written = read_line(line)
                (good if written is not None and written.ok else bad).write(line)
                yield line

        if is_table(output):
            write_table(kept(), output, like=results, with_body=with_body, properties=properties)
        else:
            for _ in kept():
                pass
