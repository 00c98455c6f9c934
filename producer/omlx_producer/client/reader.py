"""Reads for all consumers of a client: followed streams of jobs, and ends that are waited for.

One blocking XREAD serves all of them, on one connection. It looks at a job's status when it begins
to follow it, after a lost connection, and after a silence: other tools end jobs without an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from omlx_producer.client.ended import Wait, Waits
from omlx_producer.client.outcome import ENDINGS, WAITING, ask_result, read_outcome, unknown_job
from omlx_producer.connection import block_seconds
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import Reconnection
from omlx_producer.wire import events_key

IDLE_SECONDS = 5.0
# A job that was requeued still has the stream of its earlier run, until a worker claims it.
REQUEUED_SECONDS = 0.25
PAGE = 500
_LOOKS = 100
_WAKE_SECONDS = 60
_PAUSE_SECONDS = 0.02

Entries = Iterable[tuple[bytes, dict[bytes, bytes]]]


@dataclass(eq=False, slots=True)
class Follow:
    """A job that a reader follows for one consumer.

    Attributes:
        inbox: payloads of events, then an outcome or an error; a queue, sync or async.
        after: the id of the last entry read, as numbers.
        look_at: when to look at the job; monotonic seconds.
        listens: whether its stream is followed. It is not while it is that of an earlier run.
        full: whether it is not, because the consumer has yet to take a page.
    """

    job_id: str
    cursor: int
    inbox: Any
    outage: Reconnection
    after: tuple[int, int] = (0, 0)
    look_at: float = 0.0
    listens: bool = False
    full: bool = False

    def __post_init__(self) -> None:
        self.after = (self.cursor, 0)

    def read(self, entries: Entries) -> bool:
        """Hand on the entries after those read before. Returns whether the last one is the end."""
        for entry_id, fields in entries:
            if (found := _numbers(entry_id)) > self.after:
                self.after, self.look_at = found, time.monotonic() + IDLE_SECONDS
                self.inbox.put_nowait(fields.get(b"event", b""))
        return self.after[1] > 0

    def looked(
        self,
        status: bytes | None,
        results: Sequence[Any],
        entries: Sequence[Any],
        last: Sequence[Any],
    ) -> bool:
        """Take the reply to a look. Returns whether nothing more comes.

        Raises:
            UnknownJob: if there is neither a job nor the end of its stream, or no result.
            MalformedResult: see `read_outcome`.
        """
        self.outage.answered()
        ended = bool(last) and _numbers(last[0][0])[1] > 0
        self.listens = not (ended and status in WAITING)
        if not self.listens:
            self.look_at = time.monotonic() + min(REQUEUED_SECONDS, IDLE_SECONDS)
            return False
        self.look_at = time.monotonic() + IDLE_SECONDS
        ending = ENDINGS.get(status.decode()) if status else None
        if entries:
            over = self.read(entries)
            if not ended and (ending or status is None):
                self.look_at = 0.0
            return over
        if ended:
            self.inbox.put_nowait(last[0][1].get(b"event", b""))
        elif status is None:
            raise unknown_job(self.job_id)
        elif ending:
            self.inbox.put_nowait(
                read_outcome(self.job_id, ending, results[0] if results else None)
            )
        return bool(ended or ending)


def _numbers(entry_id: bytes) -> tuple[int, int]:
    tokens, _, part = entry_id.partition(b"-")
    return int(tokens), int(part)


class _Reading:
    """What sync and async readers share: what to read, and who gets what was read.

    Attributes:
        follows: jobs whose streams are followed.
        waits: for the ends of jobs.
        consumers: how many use it.
        listening: whether a read blocks, or is about to. An entry of the reader's own stream ends
            it, so that it goes on with other jobs.
    """

    def __init__(self, block: float) -> None:
        self.follows: set[Follow] = set()
        self.waits = Waits()
        self.consumers = 0
        self.listening = False
        self._block = block
        self._by_key: dict[bytes, list[Follow]] = {}
        self._own = f"omlx:reader:{secrets.token_hex(8)}".encode()
        self._woken: bytes | str = "0-0"

    def _add(self, consumer: Follow | Wait) -> None:
        self.consumers += 1
        if isinstance(consumer, Wait):
            self.waits.add(consumer)
        else:
            self.follows.add(consumer)

    def _drop(self, consumer: Follow | Wait) -> None:
        self.consumers -= 1
        if isinstance(consumer, Wait):
            self.waits.drop(consumer)
        else:
            self.follows.discard(consumer)

    def _due(self) -> tuple[list[Follow], list[Wait]]:
        """Jobs to look at now."""
        now = time.monotonic()
        due = [each for each in list(self.follows) if each.look_at <= now and not each.full]
        return due[:_LOOKS], self.waits.due(_LOOKS)

    def _ask(self, pipe: Any, follows: Iterable[Follow], waits: Sequence[Wait]) -> Any:
        for each in follows:
            key = events_key(each.job_id)
            ask_result(pipe, each.job_id)
            pipe.xrange(key, min=f"({each.after[0]}-{each.after[1]}", count=PAGE)
            pipe.xrevrange(key, count=1)
        if waits:
            self.waits.ask(pipe, waits)
        return pipe

    def _looked(
        self, follows: Sequence[Follow], waits: Sequence[Wait], replies: Sequence[Any]
    ) -> None:
        if waits:
            self.waits.looked(waits, replies[4 * len(follows) :])
        for number, each in enumerate(follows):
            found = replies[4 * number : 4 * number + 4]
            try:
                for reply in found:
                    if isinstance(reply, ResponseError):
                        raise reply
                over = each.looked(*found)
            except (OmlxQueueError, ResponseError) as error:
                each.inbox.put_nowait(error)
                over = True
            if over:
                self.follows.discard(each)

    def _listen(self) -> tuple[dict[Any, Any], int]:
        """The streams to read, each with an id, and for how many milliseconds."""
        self.listening, self._by_key = True, {}
        now = time.monotonic()
        until = min(now + self._block, self.waits.until())
        for each in list(self.follows):
            each.full = each.inbox.qsize() >= PAGE
            if not each.full:
                until = min(until, each.look_at)
                if each.listens:
                    self._by_key.setdefault(events_key(each.job_id).encode(), []).append(each)
        streams: dict[Any, Any] = {self._own: self._woken} | self.waits.streams()
        for key, follows in self._by_key.items():
            tokens, part = min(each.after for each in follows)
            streams[key] = f"{tokens}-{part}"
        return streams, max(1, int(1000 * (until - now)))

    def _heard(self, reply: Any) -> None:
        self.listening = False
        for key, entries in reply.items() if isinstance(reply, dict) else reply:
            if key == self._own:
                self._woken = entries[-1][0]
            elif key in self.waits.streams():
                self.waits.heard(key, entries)
            for each in self._by_key.get(key, ()):
                if each.read(entries):
                    self.follows.discard(each)

    def _failed(self, error: Exception) -> float:
        """Look at all jobs again. Returns the seconds to wait first."""
        self.listening = False
        pause = max(_PAUSE_SECONDS, self.waits.failed(error))
        for each in list(self.follows):
            each.look_at = 0.0
            try:
                pause = max(pause, each.outage.failed(error))
            except Exception as final:  # noqa: BLE001 (the consumer raises it)
                each.inbox.put_nowait(final)
                self.follows.discard(each)
        return pause

    def _ring(self, pipe: Any) -> Any:
        pipe.xadd(self._own, {"wake": ""}, maxlen=1, approximate=False)
        pipe.expire(self._own, _WAKE_SECONDS)
        return pipe


# A consumer that is collected leaves its reader, on any thread and at any line.
_LOCK = threading.RLock()
_READERS: dict[int, Reader] = {}
_ASYNC_READERS: dict[tuple[int, int], AsyncReader] = {}


class Reader(_Reading):
    """Reads for all consumers of a client, from a thread that ends with the last of them."""

    def __init__(self, connection: redis.Redis) -> None:
        super().__init__(block_seconds(connection))
        pool = connection.connection_pool
        # redis-py would repeat a lost read by itself, and no job would be looked at.
        options = pool.connection_kwargs | {"retry": Retry(NoBackoff(), 0)}
        self._pool = redis.ConnectionPool(connection_class=pool.connection_class, **options)
        self._connection = redis.Redis(connection_pool=self._pool)
        self._waking = threading.Lock()
        self._key = id(connection)
        # The client lives as long, so its id is not another's.
        self._client = connection

    @classmethod
    def join(cls, connection: redis.Redis, consumer: Follow | Wait) -> Reader:
        with _LOCK:
            reader = _READERS.get(id(connection))
            if reader is None:
                reader = _READERS[id(connection)] = cls(connection)
            reader._add(consumer)
            if reader.consumers == 1:
                thread = threading.Thread(target=reader._run, name="omlx-streams", daemon=True)
                thread.start()
        return reader

    def leave(self, consumer: Follow | Wait) -> None:
        with _LOCK:
            self._drop(consumer)
            if self.consumers == 0:
                del _READERS[self._key]
                self._pool.disconnect()

    def wake(self) -> None:
        """Have the reader go on with what its consumers want now."""
        with _LOCK:
            listened, self.listening = self.listening, False
        if listened:
            with self._waking, contextlib.suppress(RedisError):
                self._ring(self._connection.pipeline()).execute()

    def _run(self) -> None:
        while self.consumers:
            try:
                self._read()
            except Exception as error:  # noqa: BLE001 (each consumer raises it, or waits)
                with _LOCK:
                    pause = self._failed(error)
                time.sleep(pause)
        self._pool.disconnect()

    def _read(self) -> None:
        with _LOCK:
            due = self._due()
            streams, block = ({}, 0) if any(due) else self._listen()
        if any(due):
            replies = self._ask(self._connection.pipeline(), *due).execute(raise_on_error=False)
            with _LOCK:
                self._looked(*due, replies)
        else:
            reply = self._connection.xread(streams, count=PAGE, block=block)
            with _LOCK:
                self._heard(reply)


class AsyncReader(_Reading):
    """The form of `Reader` for one event loop: a task that ends with the last consumer."""

    def __init__(self, connection: redis.asyncio.Redis, key: tuple[int, int]) -> None:
        super().__init__(block_seconds(connection))
        pool = connection.connection_pool
        options = pool.connection_kwargs | {"retry": redis.asyncio.retry.Retry(NoBackoff(), 0)}
        self._pool = redis.asyncio.ConnectionPool(pool.connection_class, **options)
        self._connection = redis.asyncio.Redis(connection_pool=self._pool)
        self._waking = asyncio.Lock()
        self.client = connection
        self._key = key
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._retire())

    @classmethod
    def join(cls, connection: redis.asyncio.Redis, consumer: Follow | Wait) -> AsyncReader:
        key = id(connection), id(asyncio.get_running_loop())
        reader = _ASYNC_READERS.get(key)
        if reader is None:
            reader = _ASYNC_READERS[key] = cls(connection, key)
        reader._add(consumer)
        return reader

    async def leave(self, consumer: Follow | Wait) -> None:
        self._drop(consumer)
        if self.consumers == 0:
            self._retire()
            while not self._task.done():
                # redis-py may swallow a cancellation while it connects.
                self._task.cancel()
                await self._pool.disconnect()
                await asyncio.wait({self._task}, timeout=_PAUSE_SECONDS)
            await self._pool.disconnect()

    async def wake(self) -> None:
        """See `Reader.wake`."""
        listened, self.listening = self.listening, False
        if listened:
            async with self._waking:
                with contextlib.suppress(RedisError):
                    await self._ring(self._connection.pipeline()).execute()

    def _retire(self) -> None:
        """Have the next consumer begin another reader: one whose task ends reads nothing more."""
        if _ASYNC_READERS.get(self._key) is self:
            del _ASYNC_READERS[self._key]

    async def _run(self) -> None:
        while self.consumers:
            try:
                await self._read()
            except Exception as error:  # noqa: BLE001 (each consumer raises it, or waits)
                await asyncio.sleep(self._failed(error))

    async def _read(self) -> None:
        due = self._due()
        if any(due):
            pipe = self._ask(self._connection.pipeline(), *due)
            self._looked(*due, await pipe.execute(raise_on_error=False))
        else:
            streams, block = self._listen()
            self._heard(await self._connection.xread(streams, count=PAGE, block=block))


def async_readers_of(connection: redis.asyncio.Redis) -> list[AsyncReader]:
    """The readers of a client, one for each event loop."""
    return [reader for reader in _ASYNC_READERS.values() if reader.client is connection]
