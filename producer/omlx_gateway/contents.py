"""Where the bytes of uploads are: in Redis, for every gateway, or in a folder that they share."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from redis import Redis

from omlx_gateway.errors import NotStored
from omlx_gateway.limits import MAX_FILE_BYTES, MAX_REDIS_FILE_BYTES
from omlx_producer.wire.keys import KEEP_SECONDS, file_content_key

_CHUNK_BYTES = 2**20
_PART_SUFFIX = ".part"
_STALE_SECONDS = 3600


class Contents(Protocol):
    """Bytes by the id of a file.

    Attributes:
        most: bytes of a file.
        seconds: how long a file is kept; None if until it is deleted.
    """

    most: int
    seconds: int | None

    def write(self, file_id: str, content: IO[bytes]) -> int:
        """Store a content whole or not at all; returns its length."""

    def open(self, file_id: str) -> IO[bytes] | None:
        """A stored content; None if it is not here."""

    def delete(self, file_id: str) -> None:
        """Forget a content, if it is here."""

    def clean_up(self) -> None:
        """Remove what writes that were killed have left."""


@dataclass
class RedisContents:
    """A list of chunks for each file."""

    connection: Redis
    most: int = MAX_REDIS_FILE_BYTES
    seconds: int | None = KEEP_SECONDS

    def write(self, file_id: str, content: IO[bytes]) -> int:
        key = file_content_key(file_id)
        chunk = content.read(_CHUNK_BYTES)
        while True:
            more = content.read(_CHUNK_BYTES)
            with self.connection.pipeline() as pipe:
                pipe.rpush(key, chunk)
                # No record names a content that is not whole, so it need not stay.
                pipe.expire(key, _STALE_SECONDS if more else KEEP_SECONDS)
                pipe.execute()
            if not more:
                return content.tell()
            chunk = more

    def open(self, file_id: str) -> IO[bytes] | None:
        key = file_content_key(file_id)
        with writing_to(Path(tempfile.gettempdir()), "TMPDIR"):
            copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
            for index in range(self.connection.llen(key)):
                chunk: Any = self.connection.lindex(key, index)
                copy.write(chunk or b"")
        # It may have expired meanwhile.
        if not self.connection.exists(key):
            copy.close()
            return None
        copy.seek(0)
        return copy

    def delete(self, file_id: str) -> None:
        self.connection.delete(file_content_key(file_id))

    def clean_up(self) -> None:
        """It expires."""


@dataclass
class FolderContents:
    """A file for each, by its id; the folder is made with the first one."""

    folder: Path
    most: int = MAX_FILE_BYTES
    seconds: int | None = None

    def write(self, file_id: str, content: IO[bytes]) -> int:
        part = self.folder / (file_id + _PART_SUFFIX)
        with writing_to(self.folder, "--files-dir"), contextlib.ExitStack() as undo:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with part.open("xb") as stream:
                undo.callback(part.unlink, missing_ok=True)
                while chunk := content.read(_CHUNK_BYTES):
                    stream.write(chunk)
                stream.flush()
                os.fsync(stream.fileno())
            part.rename(self.folder / file_id)
            undo.pop_all()
        return content.tell()

    def open(self, file_id: str) -> IO[bytes] | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / file_id).open("rb")
        return None

    def delete(self, file_id: str) -> None:
        (self.folder / file_id).unlink(missing_ok=True)

    def clean_up(self) -> None:
        for part in self.folder.glob(f"*{_PART_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                    part.unlink()


@contextlib.contextmanager
def writing_to(folder: Path, option: str) -> Iterator[None]:
    """Name the folder when writing fails.

    Args:
        option: what names the folder.

    Raises:
        NotStored: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise NotStored(
            f"{folder}: cannot be written ({error.strerror or error}); free space or change its "
            f"mode, or give another folder with {option}"
        ) from None
