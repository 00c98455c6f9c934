"""Streams and waits of asyncio clients.

A stream blocks on a connection of its own, as a sync one does. For all waits of a client one task
looks at their jobs, in one call, again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary

import redis.asyncio
from redis.exceptions import RedisError
from rq.job import Job

from omlx_producer.client.outcome import (
    answer_of,
    ask_result,
    find_end,
    require_job_id,
    require_timeout,
    timed_out,
)
from omlx_producer.client.stream import PAGE, REQUEUED_SECONDS, Follower, entries_by_key
from omlx_producer.connection import block_seconds, connect_async, require_client
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import RECONNECT_SECONDS, Reconnection, passes
from omlx_producer.wire import Completion, End, JobEvent
from omlx_producer.wire.end import ENDED

LOOK_SECONDS, SECONDS_A_JOB = 0.02, 0.0005
"""Between two looks. A thousand waits are a look in half a second, which takes some 20 ms."""

FIRST_LOOK_SECONDS = 1.0
"""A wait looks at its job once, however short its timeout is, unless the server hangs."""


_OVER = {None, *(name.encode() for name in ENDED)}


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
        self._events = _follow_async(self._connection, Follower(job_id, cursor, reconnect_for))

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
    block = int(1000 * block_seconds(connection))
    while not follower.over:
        _waits_of(connection).require_open()
        try:
            if follower.looks:
                found = follower.looked(*await _left(follower.ask(connection.pipeline()).execute()))
            else:
                reply = await _left(connection.xread({follower.key: follower.after}, PAGE, block))
                found = follower.heard([each for _, page in entries_by_key(reply) for each in page])
        except RedisError as error:
            await asyncio.sleep(follower.failed(error))
            continue
        for event in found:
            yield event
        if follower.early:
            await asyncio.sleep(REQUEUED_SECONDS)


async def _left(call: Awaitable[Any]) -> Any:
    """The answer to a call, which may outlive its caller: redis-py swallows a cancellation while it
    connects."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task})
        return task.result()
    finally:
        task.cancel()


async def wait_for_end_async(
    connection: redis.asyncio.Redis, job_id: str, timeout: float | None
) -> Completion:
    """The form of `wait_for_end` for an event loop."""
    require_job_id(job_id)
    require_timeout(timeout)
    now = asyncio.get_running_loop().time()
    deadline = None if timeout is None else now + timeout
    look_by = None if deadline is None else max(deadline, now + FIRST_LOOK_SECONDS)
    try:
        async with asyncio.timeout_at(look_by) as limit:
            with _waits_of(connection).waiting(connection, job_id) as wait:
                told: list[asyncio.Future[Any]] = [wait.looked, wait.ended]
                await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
                limit.reschedule(None if wait.ended.done() else deadline)
                return answer_of(job_id, await wait.ended)
    except TimeoutError:
        raise timed_out(job_id, timeout) from None


def end_reading(connection: redis.asyncio.Redis) -> None:
    """End the waits of a client that is closed, and its streams at their next read."""
    _waits_of(connection).close()


class Wait:
    """For the end of one job.

    Attributes:
        looked: whether anybody has looked at the job.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.looked: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[End] = loop.create_future()

    def tell(self, find: Callable[[], End | None]) -> None:
        """Take the end, or the error of asking for it."""
        if self.ended.done():
            return
        try:
            if end := find():
                self.ended.set_result(end)
        except Exception as error:  # noqa: BLE001 (who waits raises it)
            self.ended.set_exception(error)


class Waits:
    """Those of one client. A task looks while there are any."""

    def __init__(self) -> None:
        self._waits = defaultdict[str, set[Wait]](set)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @contextlib.contextmanager
    def waiting(self, connection: redis.asyncio.Redis, job_id: str) -> Iterator[Wait]:
        """A wait for a job, until the block ends.

        Raises:
            OmlxQueueError: if the client is closed.
        """
        self.require_open()
        wait = Wait()
        self._waits[job_id].add(wait)
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(connection))
        try:
            yield wait
        finally:
            self._waits[job_id].discard(wait)
            if not self._waits[job_id]:
                del self._waits[job_id]
            if not self._waits:
                self._changed.set()

    def require_open(self) -> None:
        if self._closed:
            raise OmlxQueueError("the producer was closed while a job was waited for")

    def close(self) -> None:
        self._closed = True
        self._tell(self._waits, self.require_open)

    async def _run(self, connection: redis.asyncio.Redis) -> None:
        """Look at all jobs now and then, and at those of new waits at once."""
        outage, now, due = Reconnection(), asyncio.get_running_loop().time, 0.0
        while self._waits:
            self._changed.clear()
            is_due, pause = now() >= due, LOOK_SECONDS + SECONDS_A_JOB * len(self._waits)
            try:
                await self._look(connection, [*self._waits] if is_due else self._new())
                outage.answered()
            except Exception as error:  # noqa: BLE001 (who waits raises it)
                try:
                    pause = outage.failed(error)
                except Exception as last:  # noqa: BLE001
                    self._tell(self._waits, partial(_raise, last))
                    return
            due = now() + pause if is_due else due
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._changed.wait()

    def _new(self) -> list[str]:
        """The jobs with a wait that nobody has looked for."""
        return [
            job_id
            for job_id, waits in self._waits.items()
            if not all(wait.looked.done() for wait in waits)
        ]

    async def _look(self, connection: redis.asyncio.Redis, jobs: Sequence[str]) -> None:
        pipe = connection.pipeline(transaction=False)
        for job_id in jobs:
            pipe.hget(Job.key_for(job_id), "status")
        statuses = zip(jobs, await _replies(pipe), strict=True)
        over = [job for job, status in statuses if status in _OVER or isinstance(status, Exception)]
        for job_id in over:
            # Together: the job may be requeued meanwhile.
            ask_result(pipe, job_id)
        replies = await _replies(pipe)
        for job_id, *reply in zip(over, replies[::2], replies[1::2], strict=True):
            self._tell([job_id], partial(_find, job_id, *reply))
        for wait in self._of(jobs):
            if not wait.looked.done():
                wait.looked.set_result(None)

    def _tell(self, jobs: Iterable[str], find: Callable[[], End | None]) -> None:
        for wait in self._of(jobs):
            wait.tell(find)

    def _of(self, jobs: Iterable[str]) -> list[Wait]:
        return [wait for job_id in jobs for wait in self._waits.get(job_id, ())]


async def _replies(pipe: Any) -> list[Any]:
    """The replies to what is queued. An error that concerns one key is the reply of its job."""
    replies: list[Any] = await pipe.execute(raise_on_error=False)
    for reply in filter(passes, replies):
        raise reply
    return replies


def _find(job_id: str, *replies: Any) -> End | None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return find_end(job_id, *replies)


def _raise(error: Exception) -> NoReturn:
    raise error.with_traceback(None)


def _waits_of(connection: redis.asyncio.Redis) -> Waits:
    if connection not in _WAITS:
        _WAITS[connection] = Waits()
    return _WAITS[connection]


_WAITS: WeakKeyDictionary[redis.asyncio.Redis, Waits] = WeakKeyDictionary()
