"""Which rows the input has and where their results are: on disk, so that memory stays bounded.

SQLite's private temporary database vanishes with the process; everything in it is read again from
the input and the output. A million rows take about 60 MB of disk and the page cache below; a
dict of as many keys took several times that in memory.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

CACHE_KIB = 16 * 1024


@dataclass(frozen=True, slots=True)
class Known:
    """A row's result on file.

    Attributes:
        offset: of its line, in the file of results or that of errors.
    """

    digest: str
    ok: bool
    offset: int


class RowIndex:
    """Rows by key, see `omlx_producer.bulk.row.Row.key`."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        run = self._database.execute
        run(f"PRAGMA cache_size = -{CACHE_KIB}")
        run("PRAGMA journal_mode = OFF")
        run("PRAGMA synchronous = OFF")
        # `line` is null while the input has not shown the row, `digest` while it has no result.
        run(
            "CREATE TABLE rows (key BLOB PRIMARY KEY, line INTEGER, digest BLOB, ok INTEGER, "
            "offset INTEGER, by_line INTEGER) WITHOUT ROWID"
        )
        run("BEGIN")

    def close(self) -> None:
        self._database.close()

    def see(self, key: str, line: int) -> int | None:
        """Note that the input has a row; returns the line where it had it before."""
        packed = _pack(key)
        found = self._database.execute("SELECT line FROM rows WHERE key = ?", (packed,)).fetchone()
        if found is None:
            self._database.execute("INSERT INTO rows (key, line) VALUES (?, ?)", (packed, line))
            return None
        if found[0] is None:
            self._database.execute("UPDATE rows SET line = ? WHERE key = ?", (line, packed))
            return None
        return int(found[0])

    def known(self, key: str) -> Known | None:
        """The result of a row, if there is one."""
        found = self._database.execute(
            "SELECT digest, ok, offset FROM rows WHERE key = ? AND digest IS NOT NULL",
            (_pack(key),),
        ).fetchone()
        return None if found is None else Known(found[0].hex(), bool(found[1]), found[2])

    def record(self, key: str, digest: str, ok: bool, offset: int, *, by_line: bool) -> None:
        """Note a row's result; it takes the place of an earlier one."""
        self._database.execute(
            "INSERT INTO rows (key, digest, ok, offset, by_line) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (key) DO UPDATE SET digest = excluded.digest, ok = excluded.ok, "
            "offset = excluded.offset, by_line = excluded.by_line",
            (_pack(key), bytes.fromhex(digest), ok, offset, by_line),
        )

    def forget_absent_lines(self) -> None:
        """Drop the errors of lines that the input, read to its end, no longer has."""
        self._database.execute("DELETE FROM rows WHERE by_line AND line IS NULL")

    def count(self, ok: bool) -> int:
        """How many rows have a result of a kind."""
        found = self._database.execute("SELECT count(*) FROM rows WHERE ok = ?", (ok,)).fetchone()
        return int(found[0])

    def offsets(self, ok: bool, *, in_input_order: bool) -> Iterator[int]:
        """The offsets of the lines that count, of one kind.

        Args:
            in_input_order: rows that the input does not have come last; else by offset.
        """
        order = "line IS NULL, line, offset" if in_input_order else "offset"
        for (offset,) in self._database.execute(
            f"SELECT offset FROM rows WHERE ok = ? ORDER BY {order}", (ok,)
        ):
            yield offset


def _pack(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()
