"""Iterators over the tokens of a job: each token once, in order, from any cursor.

A consumer may attach before, during or after the job, be slow, or lose its connection. See
`omlx_producer.replay` for how it misses nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any, Self

import redis
import redis.asyncio
from redis.exceptions import ConnectionError, TimeoutError
from rq.job import Job

from omlx_producer.connection import connect, connect_async, require_bytes
from omlx_producer.outage import RECONNECT_SECONDS
from omlx_producer.outcome import ask_result
from omlx_producer.protocol import TokenEvent, events_key, tokens_channel
from omlx_producer.replay import PAGE, Replay, Step

IDLE_SECONDS = 5.0


class TokenStream:
    """An iterator over the events of a job. It ends after the terminal event.

    Args:
        connection: a Redis client, or a URL.
        cursor: the ``n`` of the last event that the consumer has had. If Redis has since lost its
            last writes, a cursor of a job with several choices may stand for other tokens; 0 is
            always exact.
        reconnect_for: seconds without Redis after which iterating raises redis-py's error. It is
            raised at once if the server has never answered.

    Attributes:
        cursor: the ``n`` of the last event read.

    Raises, while iterating:
        UnknownJob: if the job does not exist, or has expired.
        TokensLost: if the stream has lost tokens after the cursor, or holds others before it.

    >>> job = producer.submit(prompt="def f(x):")
    >>> with TokenStream(producer.connection, job.id) as stream:
    ...     first = next(stream)
    >>> later = list(job.stream(stream.cursor))
    """

    def __init__(
        self,
        connection: redis.Redis | str,
        job_id: str,
        cursor: int = 0,
        *,
        reconnect_for: float = RECONNECT_SECONDS,
    ) -> None:
        self._connection = connect(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        require_bytes(self._connection)
        self.cursor = cursor
        replay = Replay(job_id, cursor, reconnect_for=reconnect_for)
        # A generator with a reference to this object would keep it and its subscription alive.
        self._events = _follow(self._connection, replay)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TokenEvent:
        event = next(self._events)
        self.cursor = event.n
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the subscription. Close the client if it was made from a URL."""
        self._events.close()
        if self._owned:
            self._connection.close()


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
        require_bytes(self._connection)
        self.cursor = cursor
        replay = Replay(job_id, cursor, reconnect_for=reconnect_for)
        self._events = _follow_async(self._connection, replay)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        event = await anext(self._events)
        self.cursor = event.n
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the subscription. Close the client if it was made from a URL."""
        await self._events.aclose()
        if self._owned:
            await self._connection.aclose()


def _follow(connection: redis.Redis, replay: Replay) -> Generator[TokenEvent]:
    pubsub: redis.client.PubSub = connection.pubsub()  # type: ignore[no-untyped-call]
    try:
        while replay.step is not Step.END:
            try:
                events = _take_step(connection, pubsub, replay)
            except (ConnectionError, TimeoutError) as error:
                pubsub.close()
                time.sleep(replay.failed(error))
                continue
            yield from events
    finally:
        pubsub.close()


def _take_step(
    connection: redis.Redis, pubsub: redis.client.PubSub, replay: Replay
) -> list[TokenEvent]:
    if replay.step is Step.SUBSCRIBE:
        pubsub.subscribe(tokens_channel(replay.job_id))
        replay.subscribed()
        return []
    if replay.step is Step.LISTEN:
        return replay.heard(pubsub.get_message(timeout=IDLE_SECONDS))
    pipe = connection.pipeline()
    if replay.step is Step.READ:
        return replay.read(*_ask_stream(pipe, replay).execute())
    status, entries = ask_result(pipe, replay.job_id).execute()
    return replay.conclude(status, entries[0] if entries else None)


async def _follow_async(
    connection: redis.asyncio.Redis, replay: Replay
) -> AsyncGenerator[TokenEvent]:
    pubsub = connection.pubsub()
    try:
        while replay.step is not Step.END:
            try:
                events = await _take_step_async(connection, pubsub, replay)
            except (ConnectionError, TimeoutError) as error:
                await pubsub.aclose()  # type: ignore[no-untyped-call]
                await asyncio.sleep(replay.failed(error))
                continue
            for event in events:
                yield event
    finally:
        await pubsub.aclose()  # type: ignore[no-untyped-call]


async def _take_step_async(
    connection: redis.asyncio.Redis, pubsub: redis.asyncio.client.PubSub, replay: Replay
) -> list[TokenEvent]:
    if replay.step is Step.SUBSCRIBE:
        await pubsub.subscribe(tokens_channel(replay.job_id))
        replay.subscribed()
        return []
    if replay.step is Step.LISTEN:
        return replay.heard(await pubsub.get_message(timeout=IDLE_SECONDS))
    pipe = connection.pipeline()
    if replay.step is Step.READ:
        return replay.read(*await _ask_stream(pipe, replay).execute())
    status, entries = await ask_result(pipe, replay.job_id).execute()
    return replay.conclude(status, entries[0] if entries else None)


def _ask_stream(pipe: Any, replay: Replay) -> Any:
    """Queue what `Replay.read` needs on a pipeline, sync or async."""
    pipe.xrange(events_key(replay.job_id), min=replay.start, count=PAGE)
    pipe.hget(Job.key_for(replay.job_id), "status")
    return pipe
