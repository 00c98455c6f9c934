"""Streams and waits of asyncio clients. One blocking XREAD serves all those of a client.

A stream follows the events of its job. A wait follows the ends of its submitter's group: the script
that ends a job adds an entry. Other tools end jobs without one, so both look at their jobs when
they begin, after a lost connection, and after a silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Self

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from rq.job import Job

from omlx_producer.client.outcome import (
    Outcome,
    ask_result,
    find_outcome,
    require_job_id,
    require_timeout,
    results_key,
    timed_out,
)
from omlx_producer.client.stream import PAGE, REQUEUED_SECONDS, Entry, Follower, entries_by_key
from omlx_producer.connection import block_seconds, connect_async, require_client
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import RECONNECT_SECONDS, Reconnection
from omlx_producer.wire import GROUP_FIELD, JobEvent
from omlx_producer.wire.keys import ended_key, reader_key

# Connections on which consumers ask for their jobs, all together.
_ASKING = 8
_WAKE_SECONDS = 60
_PAUSE_SECONDS = 0.02

# A wait looks at its job this often, should the stream of its group not tell of the end.
RECHECK_SECONDS = 15.0
# A wait looks at its job once, however short its timeout is, unless the server hangs.
FIRST_RECHECK_SECONDS = 1.0

EntryId = tuple[int, int]


class AsyncTokenStream:
    """The form of `TokenStream` for ``async for``.

    >>> async def count(url: str, job_id: str) -> int:
    ...     async with AsyncTokenStream(url, job_id) as stream:
    ...         return len([event async for event in stream])
    >>> job = producer.submit(prompt="def f(x):")
    >>> asyncio.run(count(redis_url, job.id)) == len(list(job.stream()))
    True
    """

    def __init__(
        self,
        connection: redis.asyncio.Redis | str,
        job_id: str,
        cursor: int = 0,
        *,
        reconnect_for: float = RECONNECT_SECONDS,
    ) -> None:
        self._connection = connect_async(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        require_client(self._connection, redis.asyncio.Redis)
        self.cursor = cursor
        # A generator with a reference to this object would keep it and its reader alive.
        follower = Follower(job_id, cursor, reconnect_for)
        self._events = _follow_async(self._connection, follower)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JobEvent:
        event = await anext(self._events)
        self.cursor = event.n
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following the job. Close the client if it was made from a URL."""
        await self._events.aclose()
        if self._owned:
            await self._connection.aclose()


async def _follow_async(
    connection: redis.asyncio.Redis, follower: Follower
) -> AsyncGenerator[JobEvent]:
    silence = block_seconds(connection)
    async with AsyncReader.inbox(connection, follower.key) as inbox:
        while not follower.over:
            try:
                if follower.looks:
                    reply = await follower.ask(inbox.connection.pipeline()).execute()
                    found = follower.looked(*reply)
                else:
                    reply = await inbox.read(follower.key, follower.after, silence)
                    found = follower.heard(reply)
            except RedisError as error:
                await asyncio.sleep(follower.failed(error))
                continue
            for event in found:
                yield event
            if follower.early:
                await asyncio.sleep(REQUEUED_SECONDS)


async def wait_for_end_async(
    connection: redis.asyncio.Redis, job_id: str, timeout: float | None
) -> Outcome:
    """The form of `wait_for_end` for an event loop."""
    require_job_id(job_id)
    require_timeout(timeout)
    outage, now = Reconnection(), asyncio.get_running_loop().time()
    deadline = None if timeout is None else now + timeout
    look_by = None if deadline is None else max(deadline, now + FIRST_RECHECK_SECONDS)
    try:
        async with (
            asyncio.timeout_at(look_by) as limit,
            AsyncReader.inbox(connection, job_id, results_key(job_id)) as inbox,
        ):
            while True:
                try:
                    pipe = ask_result(inbox.connection.pipeline(), job_id)
                    pipe.hget(Job.key_for(job_id), GROUP_FIELD).time()
                    status, entries, group, (seconds, micros) = await pipe.execute()
                    outage.answered()
                    if outcome := find_outcome(job_id, status, entries):
                        return outcome
                    limit.reschedule(deadline)
                    named = group.decode(errors="replace") if group else ""
                    key = ended_key(named) if named else results_key(job_id)
                    since = 1000 * seconds + micros // 1000 - 1
                    await inbox.read(key, f"{since}-0", RECHECK_SECONDS)
                except RedisError as error:
                    limit.reschedule(deadline)
                    await asyncio.sleep(outage.failed(error))
    except TimeoutError:
        raise timed_out(job_id, timeout) from None


def end_reading(connection: redis.asyncio.Redis) -> None:
    """End the streams and waits of a client that is closed, with an error."""
    error = OmlxQueueError("the producer was closed while a job was waited for")
    for reader in [each for each in _READERS.values() if each.client is connection]:
        reader.fail(error)


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

    async def read(self, key: str, after: str, seconds: float) -> list[Entry]:
        """The entries of a stream after an id; none after a silence, or if too many have come.

        Raises:
            Exception: why reading has ended. The next call begins it again.
        """
        task = asyncio.current_task()
        if task and task.cancelling():
            # redis-py may have swallowed it while it connected.
            raise asyncio.CancelledError
        self.key = key.encode()
        last = _numbers(after)
        await self._reader.follow(self, last)
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
        return [each for each in entries if _numbers(each[0].decode()) > last]


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
        # Held, so that no other client gets its id, which is in the key of this reader.
        self.client = connection
        self._key = key
        self._block = int(1000 * block_seconds(connection))
        self._inboxes = defaultdict[bytes, set[Inbox]](set)
        # By stream who follows it, and the id of the last entry read.
        self._followers = defaultdict[bytes, set[Inbox]](set)
        self._after: dict[bytes, EntryId] = {}
        # An entry of the reader's own stream ends a read that blocks.
        self._own = reader_key(secrets.token_hex(8)).encode()
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
        """See that the task reads the stream of an inbox, from this id on at the latest."""
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
            self._after[key] = _numbers(entries[-1][0].decode())
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


def _numbers(entry_id: str) -> EntryId:
    """An id as numbers, which compare as Redis's ids do."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second)
