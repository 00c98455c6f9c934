"""The record of a run: rows in its files of results and errors, options in OUTPUT.run.

A row is done once its line is in one of the two files. Lines are only added, until the run ends.
What a kill or a power cut has left of the last ones goes when the files are opened again: their
results are still in Redis.

A lock on OUTPUT.run keeps a second process off. The system releases it when the process ends,
however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from omlx_producer.bulk.durable import (
    append,
    make_file,
    naming,
    own_file,
    remove_drafts,
    replacing,
)
from omlx_producer.bulk.row import (
    ID_PREFIX,
    LINE_KEY,
    BadRow,
    Row,
    RowResult,
    id_key,
    line_key,
    write_line,
)
from omlx_producer.errors import InvalidRequest

VERSION = 2
Kind = Literal["results", "errors"]
KINDS: tuple[Kind, ...] = ("results", "errors")
# How lines of the record and of the files begin.
_RECORD = b'{"version":'
_LINE = b'{"id":'
_RUN = re.compile(r"[0-9a-f]{8}")
_HEAD = re.compile(
    rb'\{"id":\s*"' + ID_PREFIX.encode() + rb'([0-9a-f]{24})",\s*"custom_id":\s*'
    rb'(null|"(?:[^"\\]|\\.)*").*\}\n',
    re.DOTALL,
)


class Failure(NamedTuple):
    """The error of a row: its code, and where its line begins."""

    digest: bytes
    code: str
    at: int


@dataclass(slots=True)
class Known:
    """What is known of a row. There may be millions, so digests are packed.

    Attributes:
        line: its line in the input; None until that has shown it.
        digest: its digest as it is in the input.
        done: the digest of its result, whose line begins at ``at``; None without one.
        failure: None without one. A row has both if it failed after an edit; the result is then
            that of the row before.
    """

    line: int | None = None
    digest: bytes = b""
    done: bytes | None = None
    at: int = 0
    failure: Failure | None = None

    @property
    def is_done(self) -> bool:
        """Whether the row has a result as it is in the input."""
        return self.done is not None and self.done == self.digest

    @property
    def has_failed(self) -> bool:
        """Whether it has an error as it is in the input."""
        return self.failure is not None and self.failure.digest == self.digest

    def place(self, kind: Kind) -> int | None:
        """Where its line begins; None if it has none."""
        if kind == "errors":
            return self.failure and self.failure.at
        return None if self.done is None else self.at


class Store:
    """The record of one run, open and locked. Rows are named by `Row.key`.

    Args:
        output: of the run. Without one, as in a dry run, only the rows that were seen are known.

    Attributes:
        run: the id of the run, 8 hexadecimal digits. A resumed run keeps it.
        settings: see `omlx_producer.bulk.options.RunOptions`; None before the first run.

    Raises:
        InvalidRequest: if another process has it, another version wrote it, it has two names, or a
            file has lines of something else.
        OSError: if a file cannot be read or written; so do all methods.
    """

    def __init__(self, output: Path | None = None) -> None:
        self.run = new_run_id()
        self.settings: Any = None
        self._rows: dict[str, Known] = {}
        # Of each file: it, where it ends, and how many lines it has, replaced ones included.
        self._files: dict[Kind, FileIO] = {}
        self._ends, self._lines = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
        self._paths: dict[Kind, Path] = {}
        self._closing = contextlib.ExitStack()
        if output is not None:
            with self._closing:
                self._open(output)
                self._closing = self._closing.pop_all()

    def _open(self, output: Path) -> None:
        path, results = run_path(output), results_path(output)
        make_file(path, like=output)
        self._record = self._closing.enter_context(path.open("r+b", buffering=0))
        _lock(self._record, path)
        found, self._record_end = _read_record(path)
        if found is not None:
            self.run, self.settings = found["run"], found["settings"]
        self._paths = {"results": results, "errors": errors_path(output)}
        for kind, file in self._paths.items():
            remove_drafts(file)
            make_file(file, like=output if kind == "results" else results)
            own_file(file)
            self._files[kind] = self._closing.enter_context(file.open("r+b", buffering=0))
            self._read(kind)

    def close(self) -> None:
        self._closing.close()

    def _read(self, kind: Kind) -> None:
        """Learn what a file holds; drop what a kill or a power cut has left of its last lines."""
        path = self._paths[kind]
        with path.open("rb") as stream:
            for line in stream:
                if _is_torn(line):
                    self._files[kind].truncate(self._ends[kind])
                    break
                try:
                    self._learn(kind, *_read_line(kind, line))
                except (ValueError, LookupError, TypeError):
                    place = f"line {self._lines[kind] + 1}"
                    raise _of_something_else(path, place) from None
                self._added(kind, line)

    def _learn(self, kind: Kind, key: str, digest: str, code: str) -> None:
        """Note that the next line of a file is of this row."""
        known, packed = self._rows.setdefault(key, Known()), bytes.fromhex(digest)
        if packed == known.digest:
            packed = known.digest
        if kind == "results":
            known.done, known.at, known.failure = packed, self._ends[kind], None
        elif packed != known.done:
            # Else it has succeeded since.
            known.failure = Failure(packed, code, self._ends[kind])

    def _added(self, kind: Kind, line: bytes) -> None:
        self._ends[kind] += len(line)
        self._lines[kind] += 1

    def remember(self, settings: dict[str, Any]) -> None:
        """Make these options durable, and the id of the run. Call before the first job: a lost id
        would lose the jobs."""
        if settings != self.settings:
            self.settings = settings
            document = {"version": VERSION, "run": self.run, "settings": settings}
            line = json.dumps(document).encode() + b"\n"
            append(self._record, self._record_end, line)
            self._record_end += len(line)

    # The input

    def see(self, row: Row | BadRow) -> Known:
        """Note that the input has a row; returns what is known of it.

        Its line is another one if an earlier row of the input has the same key.
        """
        known = self._rows.setdefault(row.key, Known())
        if known.line is None:
            known.line, known.digest = row.line, bytes.fromhex(row.digest)
            if known.is_done:
                known.done = known.digest
        return known

    def gone(self) -> int:
        """How many rows of earlier runs the input has not shown."""
        unseen = (known for known in self._rows.values() if known.line is None)
        return sum(known.done is not None or known.failure is not None for known in unseen)

    # Results

    def record(self, results: Sequence[RowResult]) -> None:
        """Make results and errors durable; each replaces an earlier one of its kind.

        A result also replaces an error. An error never replaces a result.
        """
        for kind in KINDS:
            new = [result for result in results if result.ok == (kind == "results")]
            lines = [write_line(result) for result in new]
            if lines:
                append(self._files[kind], self._ends[kind], b"".join(lines))
            for result, line in zip(new, lines, strict=True):
                self._learn(kind, result.row.key, result.row.digest, result.code)
                self._added(kind, line)

    def forget_stale_errors(self, *, whole: bool) -> None:
        """Drop the errors of rows that were edited since. Call at the end of the input.

        Args:
            whole: whether the input was read to its end. Errors of lines that it does not have go
                then, too.
        """
        for key, known in self._rows.items():
            if known.line is not None:
                stale = not known.has_failed
            else:
                stale = whole and key.startswith(LINE_KEY)
            if stale:
                known.failure = None

    def failures(self, *, seen: bool = False) -> Counter[str]:
        """How many rows have failed, by code.

        Args:
            seen: count only rows that the input has shown.
        """
        return Counter(
            known.failure.code
            for known in self._rows.values()
            if known.failure and not (seen and known.line is None)
        )

    def count(self, kind: Kind) -> int:
        """How many results or errors there are."""
        return sum(known.place(kind) is not None for known in self._rows.values())

    # Lines

    def _in_order(self, kind: Kind) -> list[Known]:
        """The rows with a line in a file, as they ended."""
        kept = (known for known in self._rows.values() if known.place(kind) is not None)
        return sorted(kept, key=lambda known: known.place(kind) or 0)

    def rewrite(self, *, in_input_order: bool) -> None:
        """Drop lines that were replaced, and order the others. Nothing is recorded after that."""
        for kind, path in self._paths.items():
            kept = self._in_order(kind)
            if in_input_order:
                kept.sort(key=_line_in_input)
            if in_input_order or len(kept) != self._lines[kind]:
                with path.open("rb") as stream, replacing(path) as draft:
                    for known in kept:
                        stream.seek(known.place(kind) or 0)
                        draft.write(stream.readline())

    def rows(self, *, in_input_order: bool) -> Iterator[tuple[Known, list[dict[str, Any]]]]:
        """Each row with its output lines, the result before the error.

        Args:
            in_input_order: rows that the input has not shown come last; else as they ended, those
                without a result last.

        Raises, while iterating:
            InvalidRequest: if something else has changed a line.
        """
        failed = (known for known in self._in_order("errors") if known.done is None)
        kept = [*self._in_order("results"), *failed]
        if in_input_order:
            kept.sort(key=_line_in_input)
        with contextlib.ExitStack() as stack:
            files = {
                kind: stack.enter_context(path.open("rb")) for kind, path in self._paths.items()
            }
            for known in kept:
                yield (
                    known,
                    [
                        self._document(kind, stream, at)
                        for kind, stream in files.items()
                        if (at := known.place(kind)) is not None
                    ],
                )

    def _document(self, kind: Kind, stream: IO[bytes], at: int) -> dict[str, Any]:
        stream.seek(at)
        try:
            document: dict[str, Any] = json.loads(stream.readline())
        except ValueError:
            raise _of_something_else(self._paths[kind], f"the line at byte {at}") from None
        return document


def run_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.run")


def errors_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.errors.jsonl")


def is_table(output: Path) -> bool:
    """Whether an output is made at the end, from a JSONL beside it."""
    return output.suffix.lower() in {".csv", ".parquet", ".npy"}


def results_path(output: Path) -> Path:
    """The JSONL file of results: the output itself, or a file beside a table."""
    return output.with_name(f"{output.name}.jsonl") if is_table(output) else output


def new_run_id() -> str:
    """8 hexadecimal digits, with which the ids of its batches begin."""
    return secrets.token_hex(4)


def read_settings(output: Path) -> Any:
    """The options of the run that wrote an output; None if no run did.

    Raises:
        InvalidRequest: if another version wrote them.
    """
    path = run_path(output)
    found = _read_record(path)[0] if path.exists() else None
    return found and found["settings"]


def _lock(record: FileIO, path: Path) -> None:
    try:
        with naming(path):
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidRequest(
            None, f"{path}: another command is writing it", "wait for its end, or end it"
        ) from None
    if os.fstat(record.fileno()).st_nlink > 1:
        # A copy that a backup made would get the options of other runs.
        raise InvalidRequest(
            None,
            f"{path}: has other names, as hard links",
            "copy it, and give the copy this name",
        )


def _read_record(path: Path) -> tuple[Any, int]:
    """The last record of a run, None without one, and where its line ends.

    Raises:
        InvalidRequest: if another version wrote it.
    """
    whole, end, cut = path.read_bytes().rpartition(b"\n")
    if not end and _RECORD.startswith(cut.strip(b"\0")[: len(_RECORD)]):
        return None, 0
    with contextlib.suppress(ValueError, LookupError, TypeError):
        found = json.loads(whole.rpartition(b"\n")[2])
        is_whole = "settings" in found and _RUN.fullmatch(found["run"])
        if found["version"] == VERSION and is_whole:
            return found, len(whole) + 1
    raise InvalidRequest(
        None,
        f"{path}: another version of omlx-submit wrote it",
        "use that version, or run with another output",
    )


def _is_torn(line: bytes) -> bool:
    """Whether a line was not written to its end. A power cut may leave zeros of it."""
    if line.endswith(b"\n") and b"\0" not in line:
        return False
    return _LINE.startswith(line.partition(b"\0")[0][: len(_LINE)])


def _read_line(kind: Kind, line: bytes) -> tuple[str, str, str]:
    """The key, digest and code of a row, from its line. Only those of errors are read whole.

    Raises:
        ValueError, LookupError, TypeError: if it is of something else.
    """
    found = _HEAD.fullmatch(line)
    if found is None:
        raise ValueError(line)
    digest, custom_id = found[1].decode(), json.loads(found[2])
    if kind == "results":
        return id_key(custom_id), digest, ""
    error = json.loads(line)["error"]
    return line_key(error["line"]) if "line" in error else id_key(custom_id), digest, error["code"]


def _of_something_else(path: Path, place: str) -> InvalidRequest:
    return InvalidRequest(
        None, f"{path}: {place}: something else wrote it", "remove it, or give another output"
    )


def _line_in_input(known: Known) -> float:
    return float("inf") if known.line is None else known.line
