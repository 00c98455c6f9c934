"""Beginnings of prompts on disk, for the next start of a worker.

A file holds a span of a prompt's positions. It is usable if all positions before it are known. Each
identity has a folder of its own. A file's name is a hash of what it is for; a digest in it covers
its tokens and arrays. So what is damaged, cut short or foreign is never used. A digest shows
damage, not forgery: wrong numbers would change texts, and the folder's mode keeps out who could
write them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias
from uuid import uuid4

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs, size_of

log = logging.getLogger("omlx_worker.engine.ragged.prefix_disk")

FORMAT = 3

QUEUED_BYTES = 256 << 20
"""Limit of arrays that wait to be written and thus stay in memory; a single file may be larger."""

STALE_SECONDS = 3600.0
"""Age from which an unfinished file belongs to no running worker."""

_FOLDER = "[0-9a-f]" * 16
_UNFINISHED = ".unfinished.safetensors"

Tokens: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""


class NotPrivate(Exception):
    """A folder that other users can open. The message says so and what to do."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What layers hold of a prompt from position ``start`` to the end of ``tokens``.

    Attributes:
        tokens: of the prompt, from its first.
        salt: a hash of the salt that these tokens are shared with; None without one.
        pieces: keys and values of these positions, ``[1, H, end - start, D]`` each.
        states: at the end.
    """

    tokens: Tokens
    start: int
    salt: str | None
    pieces: list[mx.array]
    states: list[mx.array]

    @property
    def nbytes(self) -> int:
        return size_of(self.pieces) + size_of(self.states)


class PrefixDisk:
    """The files of one identity, read and written by a thread of its own.

    The thread first reads the files that were used last, as many as the memory holds. Then it
    only writes. Methods belong to the decode thread, and none but `close` waits for the disk.
    Several workers may share a folder. Those that write at the same moment may exceed the limit by
    a file each.

    Args:
        folder: of all identities; made if need be.
        identity: what else the contents depend on: weights, layout, precision, software.
        limit: bytes of all files in ``folder``, of other identities and workers too. The least
            recently used are removed.
        specs: of what the model's layers keep.
        memory: bytes of files that are read.

    Attributes:
        found: what was read, the most recently used first.

    Raises:
        OSError: if the folder cannot be made.
        NotPrivate: if other users can open it.
    """

    def __init__(
        self, folder: Path, identity: str, limit: int, specs: LayerSpecs, memory: int
    ) -> None:
        self._identity = f"{FORMAT} {identity}"
        self._shared = folder
        self._folder = folder / hashlib.sha256(self._identity.encode()).hexdigest()[:16]
        # What prompts said can be told from what was kept of them, and texts depend on it.
        _make_private(folder)
        _make_private(self._folder)
        self._limit = limit
        self._pieces = len(specs.pieces)
        self._specs = {str(at): spec for at, spec in enumerate([*specs.pieces, *specs.states])}
        self._closing = self._failing = False
        self.found: SimpleQueue[Beginning] = SimpleQueue()
        self._queued = self._written = 0  # bytes so far; each belongs to one thread
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tasks.put(lambda: self._make_room(0))
        self._tasks.put(lambda: self._read_latest(memory))
        self._thread = Thread(target=self._work, name="prefixes", daemon=True)
        self._thread.start()

    def write(self, beginning: Beginning) -> bool:
        """Queue a file to be written; one that is there already counts as used.

        Nothing larger than the limit is queued, and nothing while `QUEUED_BYTES` wait.

        Args:
            beginning: its arrays fill their buffers.

        Returns:
            Whether it was queued.
        """
        size, waiting = beginning.nbytes, self._queued - self._written
        if size > self._limit or (waiting and waiting + size > QUEUED_BYTES):
            return False
        self._queued += size
        # Arrays of this thread's stream, and copies of pages that the next rows write to.
        mx.eval(beginning.pieces, beginning.states)
        self._tasks.put(lambda: self._write(beginning))
        return True

    def use(self, tokens: Tokens, start: int, salt: str | None) -> None:
        """Count a use of a file, if there is one."""
        self._tasks.put(lambda: _date(self._path(tokens, start, salt)))

    def close(self) -> None:
        """Write what is waiting, then end the thread."""
        self._closing = True
        self._tasks.put(None)
        self._thread.join()

    # The thread of the disk.

    def _work(self) -> None:
        while task := self._tasks.get():
            try:
                task()
            except FileNotFoundError:
                pass  # another worker has removed it
            except Exception as error:  # whatever it is, the thread must outlive it
                log.debug("the folder cannot be used", exc_info=True)
                if not self._failing:
                    log.warning(
                        "cannot keep beginnings of prompts in %s (%s)", self._folder, _told(error)
                    )
                self._failing = True
            del task  # and its arrays

    def _read_latest(self, memory: int) -> None:
        for _, path, size in reversed(_listed(self._folder, "*")):
            memory -= size
            if memory < 0 or self._closing:
                return
            try:
                self.found.put(self._read(path))
            except FileNotFoundError:
                continue
            except Exception as error:  # a file that nobody here wrote may fail in any way
                log.debug("a file cannot be read", exc_info=True)
                log.warning("deleting the beginning of a prompt in %s: %s", path, _told(error))
                path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Beginning:
        """Read a file.

        Raises:
            ValueError: if it is not what its name says, or does not fit the model.
            OSError, RuntimeError: if it cannot be read.
        """
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError("it is another user's")
        loaded: Any = mx.load(str(path), return_metadata=True)  # refuses one that is cut short
        arrays, metadata = loaded
        mx.eval(arrays)  # on this thread's stream, which no other thread has
        if metadata.get("digest") != _digest(arrays):
            raise ValueError("it is damaged")
        tokens, start = array("I", arrays.pop("tokens").tolist()), int(metadata["start"])
        salt = metadata.get("salt")
        if path != self._path(tokens, start, salt):
            raise ValueError("it belongs to another model or version")
        if arrays.keys() != self._specs.keys() or not all(
            spec.fits(arrays[name], start, len(tokens)) for name, spec in self._specs.items()
        ):
            raise ValueError("its arrays have other shapes than the model's")
        parts = [arrays[name] for name in self._specs]
        return Beginning(tokens, start, salt, parts[: self._pieces], parts[self._pieces :])

    def _write(self, beginning: Beginning) -> None:
        path = self._path(beginning.tokens, beginning.start, beginning.salt)
        aside = path.with_name(uuid4().hex + _UNFINISHED)
        try:
            if not path.exists():
                self._save(aside, beginning)
                size = aside.stat().st_size
                if size > self._limit:
                    return
                self._make_room(size)
                aside.replace(path)
            _date(path)
            self._failing = False
        finally:
            aside.unlink(missing_ok=True)
            self._written += beginning.nbytes

    def _save(self, path: Path, beginning: Beginning) -> None:
        arrays = dict(zip(self._specs, [*beginning.pieces, *beginning.states], strict=True))
        arrays["tokens"] = mx.array(beginning.tokens.tolist(), mx.uint32)
        metadata = {"start": str(beginning.start), "digest": _digest(arrays)}
        if beginning.salt is not None:
            metadata["salt"] = beginning.salt
        mx.save_safetensors(str(path), arrays, metadata)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until a new one fits."""
        listed = _listed(self._shared, f"{_FOLDER}/*")
        total = size + sum(length for _, _, length in listed)
        for _, path, length in listed:
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= length

    def _path(self, tokens: Tokens, start: int, salt: str | None) -> Path:
        hashed = hashlib.sha256(f"{self._identity}\n{salt}\n{start}\n".encode())
        hashed.update(tokens)
        return self._folder / f"{hashed.hexdigest()}.safetensors"


def _listed(folder: Path, pattern: str) -> list[tuple[int, Path, int]]:
    """When each file was last used, and its bytes; the least recently used first.

    What a worker left unfinished is removed.
    """
    listed = []
    stale = time.time() - STALE_SECONDS
    for path in folder.glob(f"{pattern}.safetensors"):
        try:
            status = path.lstat()
            if not path.name.endswith(_UNFINISHED):
                listed.append((status.st_mtime_ns, path, status.st_size))
            elif status.st_mtime < stale:
                path.unlink()
        except FileNotFoundError:
            continue  # another worker has removed it
    return sorted(listed)


def _digest(arrays: dict[str, mx.array]) -> str:
    """Of the arrays' bytes, in the order of their names."""
    hashed = hashlib.sha256()
    for _, part in sorted(arrays.items()):
        hashed.update(memoryview(part))  # type: ignore[arg-type]
    return hashed.hexdigest()


def _told(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(str(error))


def _date(path: Path) -> None:
    """Count a use: now, more finely than a file system's own clock."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can open, or find that it is one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise NotPrivate(f"{folder} belongs to another user; give a folder of your own")
    if status.st_mode & 0o077:
        # What others could have put there is as dangerous later.
        first = "delete its files, then " if status.st_mode & 0o022 else ""
        raise NotPrivate(
            f"the mode of {folder} is {status.st_mode & 0o777:04o}, which lets other users in; "
            f"{first}run: chmod 700 {folder}"
        )
