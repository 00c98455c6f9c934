"""Beginnings of prompts on disk, for the next start of a worker.

A file holds a span of a prompt's positions. It is usable if all positions before its start are
known; then all positions up to its end are. Each identity has a folder of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from uuid import uuid4

import mlx.core as mx

from omlx_worker.engine.ragged.prefix_file import (
    FORMAT,
    Contents,
    Span,
    Tokens,
    Unusable,
    name_of,
    read,
    short,
)

log = logging.getLogger("omlx_worker.engine.ragged.prefix_disk")

QUEUED_BYTES = 256 << 20
"""Limit of arrays that wait to be written and thus stay in memory; a single file may be larger."""

STALE_SECONDS = 3600.0
"""Age from which an unfinished file belongs to no running worker."""

_UNFINISHED = re.compile(r"[0-9a-f]{32}\.unfinished")


class PrefixDisk:
    """The files of one identity, written by a thread of its own.

    All methods belong to the decode thread. Several workers may share a folder; each finds what was
    there when it started, and what it wrote.

    Args:
        folder: of all identities; made if need be.
        identity: what else the contents depend on: weights, layout, precision, software.
        limit: bytes of all files in ``folder``, of other identities too. The least recently used
            are removed.

    Raises:
        OSError: if the folder cannot be made or listed.
    """

    def __init__(self, folder: Path, identity: str, limit: int) -> None:
        name = hashlib.sha256(f"{FORMAT} {identity}".encode()).hexdigest()[:16]
        self._folder = folder / name
        folder.mkdir(parents=True, exist_ok=True)
        # What prompts said can be told from what was kept of them.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._identity = identity
        self._limit = limit
        self._lock = threading.Lock()
        # The least recently used first.
        self._sizes: dict[Path, int] = {}
        self._paths: dict[Span, Path] = {}
        self._list(folder)
        self._waiting: dict[Span, Contents] = {}
        self._queue: SimpleQueue[Span | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="prefixes", daemon=True)
        self._writer.start()

    def matching(self, tokens: Tokens) -> list[Span]:
        """The files whose tokens are a beginning of these."""
        with self._lock:
            spans = [span for span in self._paths if span.end <= len(tokens)]
        hashed, done, hashes = hashlib.sha256(), 0, {}
        for end in sorted({span.end for span in spans}):
            hashed.update(tokens[done:end])
            done, hashes[end] = end, short(hashed)
        return [span for span in spans if hashes[span.end] == span.tokens]

    def touch(self, tokens: Tokens, start: int) -> bool:
        """Count a use of the file from ``start`` to the end of ``tokens``; False if there is none.

        One that waits to be written counts as written.
        """
        span = Span.of(tokens, start)
        with self._lock:
            path = self._paths.get(span)
            return (path is not None and self._touch(path)) or span in self._waiting

    def write(
        self, tokens: Tokens, start: int, pieces: Sequence[mx.array], states: Sequence[mx.array]
    ) -> None:
        """Queue a file to be written, from ``start`` to the end of ``tokens``.

        Nothing is queued while `QUEUED_BYTES` wait, and nothing larger than the limit.

        Args:
            pieces: keys and values of these positions, ``[1, H, end - start, D]`` each.
            states: at the end.
        """
        contents = Contents(self._identity, tokens, start, pieces, states)
        span = Span.of(tokens, start)
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

    def load(
        self, span: Span, tokens: Tokens, counts: tuple[int, int]
    ) -> tuple[list[mx.array], list[mx.array]] | None:
        """Pieces and states of a file; None if it is not usable, and then it is removed.

        Args:
            tokens: of the prompt, from its first to ``span.end`` at least.
            counts: of pieces and of states that the model's layers have.
        """
        with self._lock:
            path = self._paths.get(span)
        if path is None:
            return None
        try:
            found = read(path, self._identity, span, tokens, counts)
        except (OSError, RuntimeError, ValueError, KeyError, Unusable) as error:
            log.warning("ignoring the beginning of a prompt in %s: %s", path, error)
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

    def _list(self, folder: Path) -> None:
        listed = []
        stale = time.time() - STALE_SECONDS
        for path in folder.glob("*/*"):
            try:
                stat = path.stat()
                if Span.named(path):
                    listed.append((stat.st_mtime_ns, path, stat.st_size))
                elif _UNFINISHED.fullmatch(path.name) and stat.st_mtime < stale:
                    path.unlink()
            except FileNotFoundError:
                continue  # another worker has removed it
        for _, path, size in sorted(listed):
            self._enter(path, size)
        self._make_room(0)

    def _enter(self, path: Path, size: int) -> None:
        self._sizes[path] = size
        if path.parent == self._folder and (span := Span.named(path)):
            self._paths[span] = path

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path)
        except OSError:
            self._remove(path)
            return False
        self._sizes[path] = self._sizes.pop(path, 0)
        return True

    def _remove(self, path: Path) -> None:
        self._sizes.pop(path, None)
        span = Span.named(path)
        if span and self._paths.get(span) == path:
            del self._paths[span]
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot remove %s (%s)", path, error.strerror)

    def _make_room(self, size: int) -> None:
        total = size + sum(self._sizes.values())
        while self._sizes and total > self._limit:
            oldest = next(iter(self._sizes))
            total -= self._sizes[oldest]
            self._remove(oldest)

    # The writing thread.

    def _write(self) -> None:
        while span := self._queue.get():
            try:
                self._save(span, self._waiting[span])
            except OSError as error:
                log.warning(
                    "cannot keep the beginning of a prompt in %s (%s)", self._folder, error.strerror
                )
            with self._lock:
                del self._waiting[span]

    def _save(self, span: Span, contents: Contents) -> None:
        path = self._folder / name_of(span, contents)
        aside = self._folder / f"{uuid4().hex}.unfinished"
        try:
            with aside.open("wb") as file:
                file.writelines(contents.parts)
            with self._lock:
                self._make_room(contents.nbytes)
            aside.replace(path)
            with self._lock:
                self._enter(path, contents.nbytes)
        finally:
            aside.unlink(missing_ok=True)
