"""What a run knows, in one SQLite database beside its output: its options, rows and results.

The database alone says what is done; the files of results are copies. SQLite makes a group of
results durable in one transaction, also after a power cut, and keeps a second process off. The
system releases its lock when the process ends, however it ends.

What has no output, such as a dry run, has a temporary database, which vanishes with the process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from omlx_producer.bulk.durable import make_file
from omlx_producer.bulk.row import BadRow, Row, RowResult, write_line
from omlx_producer.errors import InvalidRequest

VERSION = 1
CACHE_KIB = 16 * 1024
Kind = Literal["results", "errors"]
KINDS: tuple[Kind, ...] = ("results", "errors")
# In the order in which rows ended; `at` is the line that a row had in the input then. The indexes
# hold what `see` needs, so it reads no lines.
_TABLES = """
CREATE TABLE run (id TEXT, settings TEXT, seconds REAL, files TEXT);
CREATE TABLE results (key BLOB, digest TEXT, at INTEGER, prompt_tokens INTEGER,
    completion_tokens INTEGER, cut_by_length INTEGER, cut_by_repetition INTEGER, line BLOB);
CREATE TABLE errors (key BLOB, digest TEXT, at INTEGER, code TEXT, line BLOB);
CREATE INDEX results_by_key ON results (key, digest);
CREATE INDEX errors_by_key ON errors (key, digest, code);
"""
# What the input has shown to this process.
_SEEN = "CREATE TEMP TABLE seen (key BLOB PRIMARY KEY, line INTEGER, digest TEXT) WITHOUT ROWID"
_ROWS = """
SELECT seen.line AS line, results.rowid AS result, errors.rowid AS error, results.at AS at,
    seen.digest IN (results.digest, errors.digest) AS current
    FROM results LEFT JOIN errors USING (key) LEFT JOIN seen USING (key)
UNION ALL
SELECT seen.line, NULL, errors.rowid, errors.at, seen.digest = errors.digest
    FROM errors LEFT JOIN seen USING (key)
    WHERE key NOT IN (SELECT key FROM results)
"""
_UNSEEN = "key NOT IN (SELECT key FROM seen)"


class Known(NamedTuple):
    """What is known of a row.

    Attributes:
        done: the digest of its result, None without one.
        failed: that of its error; ``code`` says how it failed.
        before: the line of an earlier row of the input with the same key, None without one.
    """

    done: str | None
    failed: str | None
    code: str
    before: int | None


class Stored(NamedTuple):
    """The output lines of a row, and its line in the input; None for what there is not.

    A row has two if it failed after an edit. The result is then that of the row before.

    Attributes:
        current: whether one of them is of the row as the input has it now.
    """

    line: int | None
    current: bool
    result: bytes | None
    error: bytes | None


class Totals(NamedTuple):
    """How many rows an output has, and their figures, those of earlier runs among them."""

    ok: int
    failed: int
    cut_by_length: int
    cut_by_repetition: int
    prompt_tokens: int
    completion_tokens: int


class Copied(NamedTuple):
    """What a file of lines held when its run ended."""

    size: int
    lines: int


def run_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.run")


def new_run_id() -> str:
    return secrets.token_hex(6)


class Store:
    """The database of one run, open and locked. Rows are named by `Row.key`.

    Args:
        path: None for a temporary one.
        like: a new file gets the permissions of this one, if that exists.

    Attributes:
        run: the id of the run, 12 hexadecimal digits. A resumed run keeps it.
        settings: see `omlx_producer.bulk.options.RunOptions`; None before the first run.
        seconds: how long the run has taken so far, without pauses between its commands.
        files: what the files of lines held at the last end of a command; None if it was killed.

    Raises:
        InvalidRequest: if another process has it, another version wrote it, or it has two names.
        OSError: if the file or its disk does not allow it; so do all methods.
    """

    def __init__(self, path: Path | None = None, *, like: Path | None = None) -> None:
        self.path = path
        if path is not None:
            make_file(path, like=like)
            if path.is_file() and path.stat().st_nlink > 1:
                # SQLite's log and lock go by the name.
                raise InvalidRequest(
                    None,
                    f"{path}: has other names, as hard links",
                    "copy it, and give the copy this name",
                )
        with self._errors():
            self._database = sqlite3.connect(path or "", isolation_level=None, timeout=0)
        with contextlib.ExitStack() as opening:
            opening.callback(self._database.close)
            self._open()
            opening.pop_all()

    def _open(self) -> None:
        # With the lock held for good, the log needs no shared memory.
        durable = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "fullfsync = ON")
        for pragma in durable if self.path else ("journal_mode = OFF", "synchronous = OFF"):
            self._run(f"PRAGMA {pragma}")
        self._run(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._run("PRAGMA temp.journal_mode = OFF")
        self._run(_SEEN)
        (version,) = self._run("PRAGMA user_version").fetchone()
        if not version:
            with self._transaction():
                for statement in _TABLES.split(";"):
                    self._run(statement)
                # Before the first job: a lost id would lose the jobs.
                self._run("INSERT INTO run VALUES (?, 'null', 0, '{}')", (new_run_id(),))
                self._run(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise self._of_another_version()
        found = self._run("SELECT id, settings, seconds, files FROM run").fetchone()
        self.run: str = found[0]
        self.settings: Any = json.loads(found[1])
        self.seconds: float = found[2]
        self.files: dict[str, Copied] | None = found[3] and {
            kind: Copied(*copied) for kind, copied in json.loads(found[3]).items()
        }

    def close(self) -> None:
        with self._errors():
            self._database.close()

    # The run

    def remember(self, settings: dict[str, Any]) -> None:
        """Make these options durable."""
        self.settings = settings
        self._run("UPDATE run SET settings = ?", (json.dumps(settings),))

    def spent(self, seconds: float) -> None:
        """Make durable how long the run has taken so far."""
        self.seconds = seconds
        self._run("UPDATE run SET seconds = ?", (seconds,))

    def copied(self, files: dict[str, Copied] | None) -> None:
        """Make durable what the files of lines hold; None while they are written."""
        if self.files != files:
            self.files = files
            self._run("UPDATE run SET files = ?", (None if files is None else json.dumps(files),))

    # The input

    def see(self, row: Row | BadRow) -> Known:
        """Note that the input has a row; returns what is known of it."""
        key, before = _packed(row.key), None
        added = self._run(
            "INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", (key, row.line, row.digest)
        )
        if not added.rowcount:
            before = self._run("SELECT line FROM seen WHERE key = ?", (key,)).fetchone()[0]
        done = self._run("SELECT digest FROM results WHERE key = ?", (key,)).fetchone()
        error = self._run("SELECT digest, code FROM errors WHERE key = ?", (key,)).fetchone()
        failed, code = error or (None, "")
        return Known(done and done[0], failed, code, before)

    def gone(self) -> int:
        """How many rows of earlier runs the input has not shown."""
        known = "SELECT key FROM results UNION SELECT key FROM errors"
        found = self._run(f"SELECT count(*) FROM ({known}) WHERE {_UNSEEN}")
        return int(found.fetchone()[0])

    # Results

    def record(self, results: Sequence[RowResult]) -> dict[Kind, list[bytes]]:
        """Make results and errors durable; each replaces an earlier one of its kind.

        A result also replaces an error. An error never replaces a result.

        Returns:
            Their output lines, by kind.
        """
        lines = defaultdict[Kind, list[bytes]](list)
        with self._transaction():
            self.copied(None)
            for result in results:
                line, at, usage = write_line(result), result.line, result.usage
                key, digest = _packed(result.row.key), result.row.digest
                lines["errors" if result.body is None else "results"].append(line)
                line = zlib.compress(line)
                self._run("DELETE FROM errors WHERE key = ?", (key,))
                if result.body is None:
                    failed = (key, digest, at, result.code, line)
                    self._run("INSERT INTO errors VALUES (?, ?, ?, ?, ?)", failed)
                else:
                    self._run("DELETE FROM results WHERE key = ?", (key,))
                    figures = (usage.prompt_tokens, usage.completion_tokens)
                    cuts = (usage.cut_by_length, usage.cut_by_repetition)
                    values = (key, digest, at, *figures, *cuts, line)
                    self._run("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
        return lines

    def forget_stale_errors(self, *, whole: bool) -> None:
        """Drop the errors of rows that were edited since. Call at the end of the input.

        Args:
            whole: whether the input was read to its end. Errors of lines that it does not have go
                then, too.
        """
        edited = "SELECT 1 FROM seen WHERE seen.key = errors.key AND seen.digest != errors.digest"
        by_line = "key >= CAST('line:' AS BLOB) AND key < CAST('line;' AS BLOB)"
        with self._transaction():
            self._run(f"DELETE FROM errors WHERE EXISTS ({edited})")
            if whole:
                self._run(f"DELETE FROM errors WHERE {by_line} AND {_UNSEEN}")

    def failures(self, *, seen: bool = False) -> Counter[str]:
        """How many rows have failed, by code.

        Args:
            seen: count only rows that the input has shown.
        """
        which = "WHERE key IN (SELECT key FROM seen) " if seen else ""
        found = self._run(f"SELECT code, count(*) FROM errors {which}GROUP BY code")
        return Counter(dict(found.fetchall()))

    def count(self, kind: Kind) -> int:
        """How many results or errors there are."""
        return int(self._run(f"SELECT count(*) FROM {kind}").fetchone()[0])

    def totals(self) -> Totals:
        """The figures of all rows."""
        found = self._run(
            "SELECT total(cut_by_length), total(cut_by_repetition), total(prompt_tokens), "
            "total(completion_tokens) FROM results"
        )
        figures = map(int, found.fetchone())
        return Totals(self.count("results"), self.count("errors"), *figures)

    # Lines

    def lines(self, kind: Kind, *, in_input_order: bool) -> Iterator[bytes]:
        """The output lines of all results, or of all errors.

        Args:
            in_input_order: rows that the input has not shown come last; else as they ended.
        """
        order = f"{kind}.rowid"
        if in_input_order:
            order = f"seen.line IS NULL, coalesce(seen.line, at), {order}"
        with self._errors():
            # Only numbers are sorted.
            for (rowid,) in self._database.execute(
                f"SELECT {kind}.rowid FROM {kind} LEFT JOIN seen USING (key) ORDER BY {order}"
            ):
                yield self._line(kind, rowid)

    def rows(self, *, in_input_order: bool) -> Iterator[Stored]:
        """Each row once, as in `lines`; in the order of ends, rows without a result come last."""
        order = "result IS NULL, result, error"
        if in_input_order:
            order = f"line IS NULL, coalesce(line, at), {order}"
        with self._errors():
            for line, current, result, error in self._database.execute(
                f"SELECT line, current, result, error FROM ({_ROWS}) ORDER BY {order}"
            ):
                yield Stored(
                    line,
                    bool(current),
                    result and self._line("results", result),
                    error and self._line("errors", error),
                )

    def _line(self, kind: Kind, rowid: int) -> bytes:
        found = self._run(f"SELECT line FROM {kind} WHERE rowid = ?", (rowid,))
        return zlib.decompress(found.fetchone()[0])

    # SQLite

    def _run(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._errors():
            return self._database.execute(statement, values)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._run("BEGIN IMMEDIATE")
        try:
            yield
            self._run("COMMIT")
        finally:
            if self._database.in_transaction:
                self._run("ROLLBACK")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            name = getattr(error, "sqlite_errorname", "")
            if name.startswith("SQLITE_BUSY"):
                raise InvalidRequest(
                    None,
                    f"{self.path}: another command is writing it",
                    "wait for its end, or end it",
                ) from None
            if name == "SQLITE_NOTADB":
                raise self._of_another_version() from None
            where = self.path or "the index of rows, in the folder of temporary files (TMPDIR)"
            raise OSError(errno.EIO, str(error), str(where)) from error

    def _of_another_version(self) -> InvalidRequest:
        return InvalidRequest(
            None,
            f"{self.path}: another version of omlx-submit wrote it",
            "use that version, or run with another output",
        )


def read_settings(output: Path) -> Any:
    """The options of the run that wrote an output; None if no run did.

    Raises:
        InvalidRequest: see `Store`.
    """
    if not run_path(output).exists():
        return None
    with contextlib.closing(Store(run_path(output))) as store:
        return store.settings


def _packed(key: str) -> bytes:
    """A key as SQLite takes it, lone surrogates included."""
    return key.encode(errors="surrogatepass")
