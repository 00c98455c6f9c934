"""Durable files: atomic replacement, and copies."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

# On macOS fsync does not flush the cache of the drive; this does.
F_FULLFSYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)
COPY_BYTES = 1 << 16
DRAFT = ".new"


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


def make_file(path: Path, *, like: Path | None) -> None:
    """Make an empty file with the permissions of ``like``; one that exists stays as it is."""
    if not path.exists():
        with naming(path), path.open("xb") as stream:
            copy_mode(like, stream)
        sync_folder(path.parent)


def own_file(path: Path) -> None:
    """Give a file that has other names, as hard links, a copy of its own."""
    if path.stat().st_nlink > 1:
        with path.open("rb") as source, replacing(path) as target:
            shutil.copyfileobj(source, target, COPY_BYTES)


def append(file: FileIO, end: int, data: bytes) -> None:
    """Write durable data behind what a file holds. A failure leaves none of it.

    Args:
        end: where that ends; what is behind it goes.
    """
    with naming(Path(os.fsdecode(file.name))):
        try:
            file.truncate(end)
            file.seek(end)
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]
            sync_file(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


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
