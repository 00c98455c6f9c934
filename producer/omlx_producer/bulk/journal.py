"""Durable files: a journal that survives kills and power cuts, and atomic replacement."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from omlx_producer.errors import InvalidRequest

# On macOS fsync does not flush the cache of the drive; this does.
F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
TAIL_BYTES = COPY_BYTES = 1 << 16
DRAFT = ".new"


class Journal:
    """An append-only file of lines with one writer. It is known by its data, not by its name: a
    second name of the file, by a link, is refused too.

    Opening it cuts off a last line that a kill has torn. The row of that line is still in Redis, or
    runs again.

    Args:
        like: a new file gets the permissions of this one, if that exists.

    Raises:
        InvalidRequest: if another process writes the file.

    Attributes:
        torn: bytes that were cut off.
    """

    def __init__(self, path: Path, *, like: Path | None = None) -> None:
        self.path = path
        new = not path.exists()
        self._file = path.open("ab")
        lock(self._file, path)
        if new:
            copy_mode(like, self._file)
        remove_drafts(path)
        self.torn = _cut_torn_line(path)
        self._end = path.stat().st_size
        self._dirty = False
        if new:
            sync_folder(path.parent)

    def append(self, line: bytes) -> int:
        """Write a line with its line end; returns its offset. Not durable before `sync`."""
        offset = self._end
        with naming(self.path):
            self._file.write(line)
        self._end += len(line)
        self._dirty = True
        return offset

    def sync(self) -> None:
        """Make everything appended durable."""
        if self._dirty:
            with naming(self.path):
                self._file.flush()
                sync_file(self._file.fileno())
            self._dirty = False

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """All lines with their offsets."""
        with self.path.open("rb") as stream:
            offset = 0
            for line in stream:
                yield offset, line
                offset += len(line)

    def close(self) -> None:
        with naming(self.path):
            try:
                self.sync()
            finally:
                self._file.close()

    def rewrite(self, offsets: Iterable[int]) -> None:
        """Atomically replace the file by some of its lines, in the order given, and close it."""
        self.close()
        with self.path.open("rb") as source, replacing(self.path) as target:
            for offset in offsets:
                source.seek(offset)
                target.write(source.readline())


def lock(stream: IO[bytes], path: Path) -> None:
    """Keep other processes off an open file. The system releases the lock when it is closed.

    Raises:
        InvalidRequest: if another process holds the lock; the file is then closed.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise InvalidRequest(
            None, f"{path}: another omlx-submit is writing it", "wait for its end, or end it"
        ) from None


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in an error of writing it: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path, *, like: Path | None = None) -> Iterator[IO[bytes]]:
    """Write a file that replaces ``path``, durable and whole, when the block succeeds.

    The draft is a new file in the same folder, so it is never another one behind a link. It gets
    the permissions of the file that it replaces; of ``like``, if there is none.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}{DRAFT}")
    with naming(path), draft.open("xb") as stream:
        try:
            copy_mode(path if path.exists() else like, stream)
            yield stream
            stream.flush()
            sync_file(stream.fileno())
            draft.replace(path)
            sync_folder(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def remove_drafts(path: Path) -> None:
    """Remove what a kill has left of `replacing`. Nobody else may be replacing the file."""
    for draft in path.parent.glob(f".{glob.escape(path.name)}.*{DRAFT}"):
        draft.unlink(missing_ok=True)


def copy_mode(source: Path | None, stream: IO[bytes]) -> None:
    """Give an open file the permissions of another one, if that exists."""
    if source is not None and source.exists():
        os.fchmod(stream.fileno(), stat.S_IMODE(source.stat().st_mode))


def keep_copy(paths: Iterable[Path]) -> list[Path]:
    """Copy files to the first ``NAME.1``, ``NAME.2`` and so on that none of them has yet.

    Returns:
        The copies of those that exist.
    """
    present = [path for path in paths if path.exists()]
    number = 1
    while any(os.path.lexists(_numbered(path, number)) for path in present):
        number += 1
    for path in present:
        with path.open("rb") as source, replacing(_numbered(path, number), like=path) as target:
            shutil.copyfileobj(source, target, COPY_BYTES)
    return [_numbered(path, number) for path in present]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def sync_file(descriptor: int) -> None:
    """Make a file's data durable."""
    if F_FULLFSYNC is not None:
        fcntl.fcntl(descriptor, F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a name in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cut_torn_line(path: Path) -> int:
    with path.open("r+b") as stream:
        size = position = stream.seek(0, os.SEEK_END)
        tail = b""
        while position and b"\n" not in tail:
            start = max(0, position - TAIL_BYTES)
            stream.seek(start)
            tail = stream.read(position - start) + tail
            position = start
        torn = tail[tail.rfind(b"\n") + 1 :]
        if not torn:
            return 0
        if _is_whole(torn):
            # Some editors write no line end at the end of a file.
            stream.seek(size)
            stream.write(b"\n")
            return 0
        stream.truncate(size - len(torn))
        return len(torn)


def _is_whole(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
