"""Which rows run: those without a result, each once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omlx_producer.bulk.records import Record
from omlx_producer.bulk.row import BadRow, Row, WrittenLine

CACHE_KIB = 16 * 1024


@dataclass(frozen=True, slots=True)
class Known:
    """A row's result in the output.

    Attributes:
        offset: of its line, in the file of results or of errors.
    """

    digest: str
    ok: bool
    offset: int


class RowIndex:
    """The rows of the input and of the output, by key (`Row.key`), on disk.

    It is a private temporary database of SQLite, which vanishes with the process: everything in it
    is read again from the input and the output. A million rows take about 60 MB of disk and the
    page cache below. A dict with as many keys took several times that in memory.

    Raises:
        OSError: if the folder of temporary files is full; so do all methods.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        run = self._run
        run(f"PRAGMA cache_size = -{CACHE_KIB}")
        run("PRAGMA journal_mode = OFF")
        run("PRAGMA synchronous = OFF")
        # `line` is null until the input has shown the row, `digest` until it has a result.
        run(
            "CREATE TABLE rows (key BLOB PRIMARY KEY, line INTEGER, digest BLOB, ok INTEGER, "
            "offset INTEGER, by_line INTEGER, refused INTEGER) WITHOUT ROWID"
        )
        run("BEGIN")

    def close(self) -> None:
        self._database.close()

    def see(self, key: str, line: int) -> int | None:
        """Note that the input has a row; returns the line of an earlier row with the same key."""
        packed = _pack(key)
        found = self._run("SELECT line FROM rows WHERE key = ?", (packed,)).fetchone()
        if found is None:
            self._run("INSERT INTO rows (key, line) VALUES (?, ?)", (packed, line))
            return None
        if found[0] is None:
            self._run("UPDATE rows SET line = ? WHERE key = ?", (line, packed))
            return None
        return int(found[0])

    def known(self, key: str) -> Known | None:
        """The result of a row, None without one."""
        found = self._run(
            "SELECT digest, ok, offset FROM rows WHERE key = ? AND digest IS NOT NULL",
            (_pack(key),),
        ).fetchone()
        return None if found is None else Known(found[0].hex(), bool(found[1]), found[2])

    def record(self, line: WrittenLine, offset: int) -> None:
        """Note a row's result; it replaces an earlier one."""
        self._run(
            "INSERT INTO rows (key, digest, ok, offset, by_line, refused) "
            "VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET digest = excluded.digest, ok = excluded.ok, "
            "offset = excluded.offset, by_line = excluded.by_line, refused = excluded.refused",
            (
                _pack(line.key),
                bytes.fromhex(line.digest),
                line.ok,
                offset,
                line.by_line,
                line.refused,
            ),
        )

    def forget_absent_lines(self) -> None:
        """Drop errors of lines that the input no longer has. Call at its end."""
        self._run("DELETE FROM rows WHERE by_line AND line IS NULL")

    def count(self, ok: bool) -> int:
        """How many rows succeeded, or failed."""
        found = self._run("SELECT count(*) FROM rows WHERE ok = ?", (ok,)).fetchone()
        return int(found[0])

    def count_repeatable(self) -> int:
        """How many rows failed and may succeed when they run again."""
        found = self._run("SELECT count(*) FROM rows WHERE NOT ok AND NOT refused")
        return int(found.fetchone()[0])

    def places(self, *, in_input_order: bool) -> Iterator[tuple[bool, int]]:
        """Where the current lines are: whether in the file of results, and the offset.

        Args:
            in_input_order: rows that the input does not have come last; else results by offset,
                then errors by offset.
        """
        order = "line IS NULL, line, ok DESC, offset" if in_input_order else "ok DESC, offset"
        with _disk_errors():
            for ok, offset in self._database.execute(
                f"SELECT ok, offset FROM rows WHERE digest IS NOT NULL ORDER BY {order}"
            ):
                yield bool(ok), offset

    def _run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        with _disk_errors():
            return self._database.execute(statement, values)


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        where = "the index of rows, in the folder of temporary files (TMPDIR)"
        raise OSError(errno.EIO, str(error), where) from error


def _pack(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()


@dataclass(slots=True)
class Seen:
    """What the input has shown so far.

    Attributes:
        rows: rows of the input.
        done: rows that have a result, or an error, from an earlier run.
        failed: those of them that have an error; if only such rows are asked for, all with one.
    """

    rows: int = 0
    done: int = 0
    failed: int = 0


def plan_rows(
    records: Iterable[Record],
    make: Callable[[Record], Row | BadRow],
    index: RowIndex,
    seen: Seen,
    *,
    only_failures: bool = False,
) -> Iterator[Row | BadRow]:
    """The rows that have no result yet, in the order of the input.

    A row has a result if the index knows its key with the same digest, so an edited row runs again.

    Args:
        only_failures: yield the rows that have failed instead.
    """
    for record in records:
        row = make(record)
        before = index.see(row.key, row.line)
        if before is not None:
            row = _duplicate(row, before)
            index.see(row.key, row.line)
        seen.rows += 1
        known = index.known(row.key)
        if only_failures:
            run = known is not None and not known.ok
            seen.failed += run
            run = run and not (isinstance(row, BadRow) and known and known.digest == row.digest)
        else:
            run = known is None or known.digest != row.digest
            seen.done += not run
            seen.failed += not run and known is not None and not known.ok
        if run:
            yield row


def _duplicate(row: Row | BadRow, before: int) -> BadRow:
    reason = (
        f"line {row.line}: custom_id {row.custom_id!r} was given at line {before} already; "
        "give each row its own"
    )
    if isinstance(row, BadRow):
        return replace(row, code="duplicate_custom_id", reason=reason, own_id=False)
    return BadRow(row.line, row.custom_id, "duplicate_custom_id", reason, row.digest, False)
