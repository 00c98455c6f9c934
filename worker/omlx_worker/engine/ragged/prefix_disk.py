"""Beginnings of prompts on disk, for the next start of a worker.

A file holds a span of a prompt's positions. It is usable if all positions before its start are
known; then all positions up to its end are. Each identity has a folder of its own. Workers that
share a folder count its files together, under a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.engine.ragged.prefix_arrays import Forms
from omlx_worker.engine.ragged.prefix_file import (
    FORMAT,
    Contents,
    Span,
    Tokens,
    Unusable,
    name_of,
    read,
    salted,
    short,
)

log = logging.getLogger("omlx_worker.engine.ragged.prefix_disk")

QUEUED_BYTES = 256 << 20
"""Limit of arrays that wait to be written and thus stay in memory; a single file may be larger."""

STALE_SECONDS = 3600.0
"""Age from which an unfinished file belongs to no running worker."""

_LOCK = ".lock"

_UNFINISHED = re.compile(r"[0-9a-f]{32}\.unfinished")


class NotPrivate(Exception):
    """A folder that other users can open. The message says so and what to do."""


class PrefixDisk:
    """The files of one identity, written by a thread of its own.

    All methods belong to the decode thread. Several workers may share a folder; each finds what was
    there when it started or last wrote, and what it wrote.

    Args:
        folder: of all identities; made if need be.
        identity: what else the contents depend on: weights, layout, precision, software.
        limit: bytes of all files in ``folder``, of other identities and workers too. The least
            recently used are removed.
        forms: of what the model's layers keep.

    Raises:
        OSError: if the folder cannot be made or listed.
        NotPrivate: if other users can open it.
    """

    def __init__(self, folder: Path, identity: str, limit: int, forms: Forms) -> None:
        name = hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:16]
        self._shared = folder
        self._folder = folder / name
        # What prompts said can be told from what was kept of them, and texts depend on it.
        _make_private(folder)
        _make_private(self._folder)
        self._identity = identity
        self._limit = limit
        self._forms = forms
        self._lock = threading.Lock()
        self._paths: dict[Span, Path] = {}
        with self._alone():
            self._make_room(0)
        self._waiting: dict[Span, Contents] = {}
        self._queue: SimpleQueue[Span | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="prefixes", daemon=True)
        self._writer.start()

    def matching(self, tokens: Tokens, salt: str | None = None) -> list[Span]:
        """The files whose tokens are a beginning of these, and whose salt is this one."""
        with self._lock:
            spans = [span for span in self._paths if span.end <= len(tokens)]
        hashed, done, hashes = salted(salt), 0, {}
        for end in sorted({span.end for span in spans}):
            hashed.update(tokens[done:end])
            done, hashes[end] = end, short(hashed)
        return [span for span in spans if hashes[span.end] == span.tokens]

    def touch(self, tokens: Tokens, start: int, salt: str | None = None) -> bool:
        """Count a use of the file from ``start`` to the end of ``tokens``; False if there is none.

        One that waits to be written counts as written.
        """
        span = Span.of(tokens, start, salt)
        with self._lock:
            path = self._paths.get(span)
            return (path is not None and self._touch(path)) or span in self._waiting

    def write(
        self,
        tokens: Tokens,
        start: int,
        pieces: Sequence[mx.array],
        states: Sequence[mx.array],
        salt: str | None = None,
    ) -> None:
        """Queue a file to be written, from ``start`` to the end of ``tokens``.

        Nothing is queued while `QUEUED_BYTES` wait, and nothing larger than the limit.

        Args:
            pieces: keys and values of these positions, ``[1, H, end - start, D]`` each.
            states: at the end.
        """
        span = Span.of(tokens, start, salt)
        contents = Contents(self._identity, tokens, span, pieces, states)
        with self._lock:
            waiting = sum(other.nbytes for other in self._waiting.values())
            if contents.nbytes > self._limit or (
                waiting and waiting + contents.nbytes > QUEUED_BYTES
            ):
                return
        contents.view()
        with self._lock:
            self._waiting[span] = contents
        self._queue.put(span)

    def load(self, span: Span, tokens: Tokens) -> tuple[list[mx.array], list[mx.array]] | None:
        """Pieces and states of a file; None if it is not usable, and then it is removed.

        Args:
            tokens: of the prompt, from its first to ``span.end`` at least.
        """
        with self._lock:
            path = self._paths.get(span)
        if path is None:
            return None
        try:
            found = read(path, self._identity, span, tokens, self._forms)
        except FileNotFoundError:
            with self._lock:
                self._paths.pop(span, None)  # another worker has removed it
            return None
        except Exception as error:  # a file that nobody here wrote may fail in any way
            log.debug("a file cannot be read", exc_info=True)
            reason = error if isinstance(error, Unusable) else one_line(str(error))
            log.warning("deleting the beginning of a prompt in %s: %s", path, reason)
            with self._lock:
                self._remove(path)
            return None
        with self._lock:
            self._touch(path)
        return found

    def close(self) -> None:
        """Write what is waiting, then end the thread."""
        self._queue.put(None)
        self._writer.join()

    # The index. The lock is held.

    def _touch(self, path: Path) -> bool:
        try:
            _date(path)
        except OSError:
            self._remove(path)
            return False
        return True

    def _remove(self, path: Path) -> None:
        span = Span.named(path)
        if span and self._paths.get(span) == path:
            del self._paths[span]
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s (%s)", path, error.strerror)

    # The folder, which other workers may use.

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let no other worker add files inside of the block."""
        with (self._shared / _LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until a new one fits, and index the others."""
        listed = self._listed()
        total = size + sum(length for _, _, length in listed)
        removed = 0
        with self._lock:
            for _, path, length in listed:
                if total <= self._limit:
                    break
                self._remove(path)
                total -= length
                removed += 1
            kept = [path for _, path, _ in listed[removed:] if path.parent == self._folder]
            self._paths = {span: path for path in kept if (span := Span.named(path))}

    def _listed(self) -> list[tuple[int, Path, int]]:
        """When each file was last used, and its bytes; the least recently used first."""
        listed = []
        stale = time.time() - STALE_SECONDS
        for path in self._shared.glob("*/*"):
            try:
                stat = path.stat()
                if Span.named(path):
                    listed.append((stat.st_mtime_ns, path, stat.st_size))
                elif _UNFINISHED.fullmatch(path.name) and stat.st_mtime < stale:
                    path.unlink()
            except FileNotFoundError:
                continue  # another worker has removed it
        return sorted(listed)

    # The writing thread.

    def _write(self) -> None:
        while span := self._queue.get():
            try:
                self._save(span, self._waiting[span])
            except Exception as error:  # whatever it is, the thread must outlive it
                log.debug("a file cannot be written", exc_info=True)
                reason = getattr(error, "strerror", None) or one_line(str(error))
                log.warning(
                    "cannot keep the beginning of a prompt in %s (%s)", self._folder, reason
                )
            with self._lock:
                del self._waiting[span]

    def _save(self, span: Span, contents: Contents) -> None:
        path = self._folder / name_of(span, contents)
        aside = self._folder / f"{uuid4().hex}.unfinished"
        try:
            with aside.open("wb") as file:
                file.writelines(contents.parts)
            _date(aside)
            with self._alone():
                self._make_room(contents.nbytes)
                aside.replace(path)
            with self._lock:
                self._paths[span] = path
        finally:
            aside.unlink(missing_ok=True)


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
