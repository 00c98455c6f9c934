"""Which rows run, each once, and in which order.

Rows without a result run: common prefixes together, long and short rows mixed. Rows change places
only within a buffer of `BUFFER_ROWS` rows and `BUFFER_CHARACTERS` characters. So memory is bounded
and results come roughly in the order of the input.

Rows with different ``cache_salt`` share nothing, so they are in different groups. A worker takes
consecutive rows in one claim, so most rows of a group meet on one worker.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from omlx_producer.bulk.records import Record
from omlx_producer.bulk.row import REFUSED, BadRow, Row, WrittenLine, prompt_text

CACHE_KIB = 16 * 1024
BUFFER_ROWS = 1024
BUFFER_CHARACTERS = 32 * 2**20
# Rows with this many characters in common form a group; those with this many times as many, again.
PREFIX_CHARACTERS = 256
LONGER = 4
_FORGET_ERROR = (
    "UPDATE rows SET failed = NULL, error = NULL, code = NULL, by_line = NULL WHERE key = ?"
)


class Known(NamedTuple):
    """What the output says about a row.

    Attributes:
        done: the digest of its result, None without one.
        failed: that of its error; ``code`` says how it failed.
    """

    done: str | None
    failed: str | None
    code: str


class Place(NamedTuple):
    """Where the lines of a row are: offsets in the file of results, and in that of errors.

    A row has both if it failed after an edit. The result is then that of the row before.
    """

    line: int | None
    result: int | None
    error: int | None


class Totals(NamedTuple):
    """The rows of an output with their figures, whichever run they are of."""

    ok: int
    failed: int
    cut_by_length: int
    cut_by_repetition: int
    prompt_tokens: int
    completion_tokens: int


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
        # `line` is null until the input has shown the row, `done` and `failed` until it has a
        # result or an error.
        run(
            "CREATE TABLE rows (key BLOB PRIMARY KEY, line INTEGER, "
            "done BLOB, result INTEGER, tokens_in INTEGER, tokens_out INTEGER, cut INTEGER, "
            "loops INTEGER, failed BLOB, error INTEGER, code TEXT, by_line INTEGER) WITHOUT ROWID"
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

    def known(self, key: str) -> Known:
        """What the output says about a row."""
        found = self._run("SELECT done, failed, code FROM rows WHERE key = ?", (_pack(key),))
        done, failed, code = found.fetchone() or (None, None, None)
        return Known(done and done.hex(), failed and failed.hex(), code or "")

    def record(self, line: WrittenLine, offset: int) -> None:
        """Note a result or an error of a row; it replaces an earlier one of its kind.

        A result also replaces the error of the same request. An error never replaces a result.
        """
        key, digest = _pack(line.key), bytes.fromhex(line.digest)
        if line.ok:
            usage = line.usage
            self._run(
                "INSERT INTO rows (key, done, result, tokens_in, tokens_out, cut, loops) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET done = excluded.done, "
                "result = excluded.result, tokens_in = excluded.tokens_in, "
                "tokens_out = excluded.tokens_out, cut = excluded.cut, loops = excluded.loops",
                (
                    key,
                    digest,
                    offset,
                    usage.prompt_tokens,
                    usage.completion_tokens,
                    usage.cut_by_length,
                    usage.cut_by_repetition,
                ),
            )
            self._run(f"{_FORGET_ERROR} AND failed = ?", (key, digest))
        else:
            self._run(
                "INSERT INTO rows (key, failed, error, code, by_line) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET failed = excluded.failed, "
                "error = excluded.error, code = excluded.code, by_line = excluded.by_line",
                (key, digest, offset, line.code, line.by_line),
            )

    def forget_error(self, key: str) -> None:
        """Drop the error of a row, which was one of another request."""
        self._run(_FORGET_ERROR, (_pack(key),))

    def forget_absent_lines(self) -> None:
        """Drop errors of lines that the input no longer has. Call at its end."""
        self._run("DELETE FROM rows WHERE by_line AND line IS NULL")

    def failures(self, *, seen: bool = False) -> Counter[str]:
        """How many rows have failed, by code.

        Args:
            seen: count only rows that the input has shown.
        """
        which = "failed NOT NULL AND line NOT NULL" if seen else "failed NOT NULL"
        found = self._run(f"SELECT code, count(*) FROM rows WHERE {which} GROUP BY code")
        return Counter(dict(found.fetchall()))

    def totals(self) -> Totals:
        """The figures of all rows."""
        found = self._run(
            "SELECT count(done), count(failed), total(cut), total(loops), total(tokens_in), "
            "total(tokens_out) FROM rows"
        )
        return Totals(*map(int, found.fetchone()))

    def places(self, *, in_input_order: bool) -> Iterator[Place]:
        """Where the current lines are.

        Args:
            in_input_order: rows that the input does not have come last; else results by offset,
                then errors by offset.
        """
        order = "result IS NULL, result, error"
        if in_input_order:
            order = f"line IS NULL, line, {order}"
        with _disk_errors():
            for place in self._database.execute(
                "SELECT line, result, error FROM rows WHERE done NOT NULL OR failed NOT NULL "
                f"ORDER BY {order}"
            ):
                yield Place(*place)

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
    refused_too: bool = False,
) -> Iterator[Row | BadRow]:
    """The rows that have neither a result nor an error yet, in the order of the input.

    An edited row has another digest, so it runs again.

    Args:
        only_failures: yield instead the failed rows that may succeed now: those that were not
            refused, and those that were edited since.
        refused_too: take also those that a worker refused.
    """
    for record in records:
        row = make(record)
        before = index.see(row.key, row.line)
        if before is not None:
            row = _duplicate(row, before)
            index.see(row.key, row.line)
        seen.rows += 1
        known = index.known(row.key)
        failed = known.failed is not None
        same = known.failed == row.digest
        if failed and not same:
            index.forget_error(row.key)
        if only_failures:
            seen.failed += failed
            final = isinstance(row, BadRow) or (known.code in REFUSED and not refused_too)
            run = failed and row.digest != known.done and not (same and final)
        else:
            run = not same and row.digest != known.done
            seen.done += not run
            seen.failed += same
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


def balanced(rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
    """All rows, ordered within each buffer. Bad rows pass through at once."""
    buffer: list[Row] = []
    characters = 0
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        buffer.append(row)
        characters += row.characters
        if len(buffer) == BUFFER_ROWS or characters >= BUFFER_CHARACTERS:
            yield from arrange(buffer)
            buffer, characters = [], 0
    yield from arrange(buffer)


def arrange(rows: list[Row], characters: int = PREFIX_CHARACTERS) -> list[Row]:
    """Order rows by groups with a common prefix, the group with the most work first.

    A group is ordered alike, by longer prefixes. Rows that share their prefix with no other
    form the last group, in which short rows fill the gaps that the groups leave.

    Args:
        characters: that rows of a group have in common.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = (row.request.cache_salt or "", prompt_text(row.request)[:characters])
        groups.setdefault(key, []).append(row)
    shared = [(text, group) for (_, text), group in groups.items() if len(group) > 1]
    shared.sort(key=lambda entry: sum(row.work for row in entry[1]), reverse=True)
    ordered = []
    for text, group in shared:
        whole = len(text) < characters
        ordered += deal(group) if whole else arrange(group, LONGER * characters)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return ordered + deal(alone)


def deal(rows: list[Row]) -> list[Row]:
    """Order rows as longest, shortest, second longest, second shortest, and so on.

    Any stretch holds about the same work, so no worker gets all the long rows.
    """
    ranked = sorted(rows, key=lambda row: row.work, reverse=True)
    half = (len(ranked) + 1) // 2
    longer, shorter = ranked[:half], ranked[half:][::-1]
    dealt = [row for pair in zip(longer, shorter, strict=False) for row in pair]
    return dealt + longer[len(shorter) :]
