"""The bytes of uploads: a list of chunks in Redis for each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from redis import Redis

from omlx_gateway.errors import NotStored
from omlx_producer.wire.keys import KEEP_SECONDS, file_content_key

_CHUNK_BYTES = 2**20
_STALE_SECONDS = 3600


def write(connection: Redis, file_id: str, content: IO[bytes]) -> int:
    """Store a content; returns its length."""
    key, more = file_content_key(file_id), content.read(_CHUNK_BYTES)
    while True:
        chunk, more = more, content.read(_CHUNK_BYTES)
        with connection.pipeline() as pipe:
            pipe.rpush(key, chunk)
            # No record names a content that is not whole, so it need not stay.
            pipe.expire(key, _STALE_SECONDS if more else KEEP_SECONDS)
            pipe.execute()
        if not more:
            return content.tell()


def read(connection: Redis, file_id: str) -> IO[bytes] | None:
    """A stored content; None if it has gone."""
    key = file_content_key(file_id)
    with on_disk():
        copy = tempfile.TemporaryFile()  # noqa: SIM115 (the caller closes it)
        for index in range(connection.llen(key)):
            chunk: Any = connection.lindex(key, index)
            copy.write(chunk or b"")
    # It may have expired meanwhile.
    if not connection.exists(key):
        copy.close()
        return None
    copy.seek(0)
    return copy


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Name the folder of temporary files when writing fails.

    Raises:
        NotStored: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise NotStored(
            f"{tempfile.gettempdir()}: cannot be written ({error.strerror or error}); "
            "free space or change its mode, or give another folder with TMPDIR"
        ) from None
