"""One blocking XREAD for all consumers of an asyncio client, on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from omlx_producer.connection import block_seconds
from omlx_producer.errors import OmlxQueueError

PAGE = 500
# Connections on which consumers ask for their jobs, all together.
_ASKING = 8
_WAKE_SECONDS = 60
_PAUSE_SECONDS = 0.02

Entry = tuple[bytes, dict[bytes, bytes]]
EntryId = tuple[int, int]


def entry_id(told: bytes) -> EntryId:
    """The id of an entry as numbers, which compare as Redis's ids do."""
    first, _, second = told.partition(b"-")
    return int(first), int(second)


def entries_by_key(reply: Any) -> Sequence[tuple[bytes, list[Entry]]]:
    """The reply to XREAD, whose form depends on the version of the protocol."""
    if isinstance(reply, dict):
        return [(key, entries) for key, (entries,) in reply.items()]
    return reply or ()


class Inbox:
    """What a reader has for one consumer: a page of entries at most, or an error.

    Attributes:
        names: see `AsyncReader.inbox`.
        key: of the stream that it follows.
        connection: a client that does not repeat a lost call, for what else the consumer asks.
    """

    def __init__(self, reader: AsyncReader, names: Sequence[str]) -> None:
        self.names = [name.encode() for name in names]
        self.key = b""
        self.connection = reader.connection
        self._reader = reader
        self._entries: list[Entry] = []
        self._missed = False
        self._error: Exception | None = None
        self._came = asyncio.Event()

    def put(self, entry: Entry) -> None:
        self._missed = self._missed or len(self._entries) == PAGE
        if not self._missed:
            self._entries.append(entry)
        self._came.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._came.set()

    async def read(self, key: str, after: EntryId, seconds: float) -> list[Entry]:
        """New entries of a stream; none after a silence, or if more came than were read.

        Entries up to ``after`` may come again.

        Raises:
            Exception: why reading has ended. The next call begins it again.
        """
        self.key = key.encode()
        await self._reader.follow(self, after)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()
        self._came.clear()
        error, self._error = self._error, None
        entries, self._entries = ([] if self._missed else self._entries), []
        self._missed = False
        if error is not None:
            # Of many consumers; each raises it anew.
            raise error.with_traceback(None)
        return entries


class AsyncReader:
    """Reads for all consumers of a client on one event loop, by a task that ends with the last.

    A consumer opens an inbox, looks at its job, and then reads a stream from where it looked. So it
    misses nothing, whoever else reads the same stream. After an error the task ends, and consumers
    look and read again.
    """

    def __init__(self, connection: redis.asyncio.Redis, key: tuple[int, int]) -> None:
        pool = connection.connection_pool
        # redis-py would repeat a lost read by itself, and no consumer would look at its job.
        options = pool.connection_kwargs | {"retry": Retry(NoBackoff(), 0)}
        self._pool = redis.asyncio.BlockingConnectionPool(
            1 + _ASKING, timeout=None, connection_class=pool.connection_class, **options
        )
        self.connection = redis.asyncio.Redis(connection_pool=self._pool)
        # The client lives as long, so its id is not another's.
        self.client = connection
        self._key = key
        self._block = int(1000 * block_seconds(connection))
        self._inboxes = defaultdict[bytes, set[Inbox]](set)
        # By stream who follows it, and the id of the last entry read.
        self._followers = defaultdict[bytes, set[Inbox]](set)
        self._after: dict[bytes, EntryId] = {}
        # An entry of the reader's own stream ends a read that blocks.
        self._own = f"omlx:reader:{secrets.token_hex(8)}".encode()
        self._blocks = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def inbox(cls, connection: redis.asyncio.Redis, *names: str) -> AsyncIterator[Inbox]:
        """What comes for names: keys of streams, or values of the field ``job`` of any stream."""
        key = id(connection), id(asyncio.get_running_loop())
        reader = _READERS.get(key)
        if reader is None:
            reader = _READERS[key] = cls(connection, key)
        inbox = Inbox(reader, names)
        for name in inbox.names:
            reader._inboxes[name].add(inbox)
        try:
            yield inbox
        finally:
            await reader._leave(inbox)

    async def follow(self, inbox: Inbox, after: EntryId) -> None:
        """Read a stream, and not only from a later entry on."""
        key = inbox.key
        self._followers[key].add(inbox)
        if key in self._after and self._after[key] <= after:
            return
        self._after[key] = after
        self._after.setdefault(self._own, (0, 0))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        elif self._blocks:
            self._blocks = False
            with contextlib.suppress(RedisError):
                pipe = self.connection.pipeline()
                pipe.xadd(self._own, {"wake": ""}, maxlen=1, approximate=False)
                pipe.expire(self._own, _WAKE_SECONDS)
                await pipe.execute()

    def fail(self, error: Exception) -> None:
        """End all reading; each consumer raises the error, or goes on."""
        self._after.clear()
        for inbox in [each for inboxes in self._inboxes.values() for each in inboxes]:
            inbox.fail(error)

    async def _run(self) -> None:
        try:
            while self._after:
                self._blocks = True
                ids: dict[Any, Any] = {key: "{}-{}".format(*at) for key, at in self._after.items()}
                reply = await self.connection.xread(ids, count=PAGE, block=self._block)
                self._blocks = False
                for key, entries in entries_by_key(reply):
                    self._hand_out(key, entries)
        except Exception as error:  # noqa: BLE001 (consumers raise it)
            self.fail(error)

    def _hand_out(self, key: bytes, entries: list[Entry]) -> None:
        if key in self._after:
            self._after[key] = entry_id(entries[-1][0])
        for entry in entries:
            for inbox in self._inboxes.get(entry[1].get(b"job", key), ()):
                inbox.put(entry)

    async def _leave(self, inbox: Inbox) -> None:
        for name in inbox.names:
            self._inboxes[name].discard(inbox)
            if not self._inboxes[name]:
                del self._inboxes[name]
        self._followers[inbox.key].discard(inbox)
        if not self._followers[inbox.key]:
            del self._followers[inbox.key]
            self._after.pop(inbox.key, None)
        if not self._inboxes:
            if _READERS.get(self._key) is self:
                del _READERS[self._key]
            while self._task and not self._task.done():
                # redis-py may swallow a cancellation while it connects.
                self._task.cancel()
                await self._pool.disconnect()
                await asyncio.wait({self._task}, timeout=_PAUSE_SECONDS)
            await self._pool.disconnect()


_READERS: dict[tuple[int, int], AsyncReader] = {}


def end_reading(connection: redis.asyncio.Redis) -> None:
    """End the streams and waits of a client that is closed, with an error."""
    error = OmlxQueueError("the producer was closed while a job was waited for")
    for reader in [each for each in _READERS.values() if each.client is connection]:
        reader.fail(error)
