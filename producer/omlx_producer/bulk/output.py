"""The files of a run: results, errors, and the table (CSV or Parquet) made of the results."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omlx_producer.bulk.journal import Journal, replacing
from omlx_producer.bulk.plan import RowIndex
from omlx_producer.bulk.records import MAX_LINE_BYTES, import_pyarrow
from omlx_producer.bulk.row import BadRow, RowResult, may_be_ours, read_line, write_line
from omlx_producer.errors import InvalidRequest

TABLES = {".csv", ".parquet"}
COLUMNS = (
    "custom_id",
    "text",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "model",
    "response",
)
"""Of the table. ``text`` is that of the first choice, ``response`` the whole body."""

TABLE_CHUNK = 512


def errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors.jsonl")


def require_output(output: Path) -> None:
    """Refuse an output that has no folder, or whose format needs what is not installed.

    Raises:
        InvalidRequest: with the remedy.
    """
    if output.suffix.lower() == ".parquet":
        import_pyarrow()
    if not output.parent.is_dir():
        raise InvalidRequest(f"{output}: there is no folder {output.parent}; make it first")


def results_path(output: Path) -> Path:
    """The JSONL file of results: the output itself, or a file beside a table."""
    if output.suffix.lower() in TABLES:
        return output.with_name(f"{output.name}.jsonl")
    return output


class OutputFiles:
    """The sink of a run on this machine; see `omlx_producer.bulk.feed.Sink`.

    Opening it reads the lines of earlier runs into the index: the files alone say what is done. Of
    several lines of a row the last one counts, and a result counts more than an error.

    Raises:
        InvalidRequest: if the output exists and no run wrote it.
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
        """Bytes of torn lines that were cut off."""
        return self._results.torn + self._errors.torn

    def commit(self, results: Sequence[RowResult]) -> None:
        """Append the lines of results; returns when they are durable."""
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
        """Drop replaced lines, order the others, write the table. Call at the end of the input."""
        self._index.forget_absent_lines()
        for ok, journal in ((True, self._results), (False, self._errors)):
            if ordered or self._lines[ok] != self._index.count(ok):
                journal.rewrite(self._index.offsets(ok, in_input_order=ordered))
            else:
                journal.close()
        if self._output != self._results.path:
            write_table(self._results.path, self._output)

    def close(self) -> None:
        """Close the files as they are; a later run resumes."""
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
    """Refuse a file that no run wrote: opening it would cut off its last line.

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


def write_results(lines: Iterable[bytes], output: Path) -> None:
    """Write the output lines of a batch into the files that a run on this machine has.

    Raises:
        OSError: if a file cannot be written.
    """
    results = results_path(output)
    with replacing(results) as good, replacing(errors_path(output)) as bad:
        for line in lines:
            written = read_line(line)
            (good if written is not None and written.ok else bad).write(line)
    if results != output:
        write_table(results, output)


def write_table(results: Path, output: Path) -> None:
    """Write the table of a file of results.

    Raises:
        InvalidRequest: if Parquet is asked for without pyarrow.
    """
    if output.suffix.lower() == ".parquet":
        _write_parquet(results, output)
    else:
        _write_csv(results, output)


def _rows(results: Path) -> Iterator[dict[str, Any]]:
    with results.open("rb") as stream:
        for line in stream:
            document = json.loads(line)
            body = document["response"]["body"]
            choice = body["choices"][0]
            yield {
                "custom_id": document["custom_id"],
                "text": choice["text"] if "text" in choice else choice["message"]["content"],
                "finish_reason": choice["finish_reason"],
                "prompt_tokens": body["usage"]["prompt_tokens"],
                "completion_tokens": body["usage"]["completion_tokens"],
                "model": body["model"],
                "response": json.dumps(body, ensure_ascii=False),
            }


def _write_csv(results: Path, output: Path) -> None:
    with replacing(output) as stream:
        text = io.TextIOWrapper(stream, "utf-8", newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(_rows(results))
        text.detach()


def _write_parquet(results: Path, output: Path) -> None:
    arrow, parquet = import_pyarrow()
    types = {"prompt_tokens": arrow.int64(), "completion_tokens": arrow.int64()}
    schema = arrow.schema([(name, types.get(name, arrow.string())) for name in COLUMNS])
    rows = _rows(results)
    with replacing(output) as stream, parquet.ParquetWriter(stream, schema) as writer:
        while chunk := list(itertools.islice(rows, TABLE_CHUNK)):
            writer.write_table(arrow.Table.from_pylist(chunk, schema=schema))
