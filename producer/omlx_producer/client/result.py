"""Waits for the end of a job: any number at once, over one connection of a client."""

from __future__ import annotations

import asyncio
import time
from queue import Empty, SimpleQueue

import redis
import redis.asyncio

from omlx_producer.client.ended import Wait
from omlx_producer.client.outcome import (
    Outcome,
    ask_result,
    find_outcome,
    require_job_id,
    timed_out,
)
from omlx_producer.client.reader import AsyncReader, Reader, async_readers_of
from omlx_producer.errors import OmlxQueueError

Item = Outcome | Exception | None
# A wait looks at its job once, however short its timeout is, unless the server hangs.
FIRST_LOOK_SECONDS = 1.0


def wait_for_end(connection: redis.Redis, job_id: str, timeout: float | None) -> Outcome:
    """Wait for the end of a job; see `Producer.result` for the errors."""
    require_job_id(job_id)
    deadline = None if timeout is None else time.monotonic() + timeout
    replies = ask_result(connection.pipeline(), job_id).execute(raise_on_error=False)
    if outcome := find_outcome(job_id, *replies):
        return outcome
    wait = Wait(job_id, SimpleQueue[Item]())
    reader = Reader.join(connection, wait)
    try:
        reader.wake()
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            item: Item = wait.inbox.get(timeout=left)
            if item is not None:
                return _given(item)
    except Empty:
        raise timed_out(job_id, timeout) from None
    finally:
        reader.leave(wait)


async def wait_for_end_async(
    connection: redis.asyncio.Redis, job_id: str, timeout: float | None
) -> Outcome:
    """The form of `wait_for_end` for an event loop."""
    require_job_id(job_id)
    now = asyncio.get_running_loop().time()
    deadline = None if timeout is None else now + timeout
    look_by = None if deadline is None else max(deadline, now + FIRST_LOOK_SECONDS)
    wait = Wait(job_id, asyncio.Queue[Item]())
    reader = AsyncReader.join(connection, wait)
    try:
        async with asyncio.timeout_at(look_by) as limit:
            await reader.wake()
            item: Item = await wait.inbox.get()
            if item is None:
                limit.reschedule(deadline)
                item = await wait.inbox.get()
        return _given(item)
    except TimeoutError:
        raise timed_out(job_id, timeout) from None
    finally:
        await reader.leave(wait)


def end_waits(connection: redis.asyncio.Redis) -> None:
    """End all waits of a client that is closed."""
    error = OmlxQueueError("the producer was closed while it waited for a result")
    for reader in async_readers_of(connection):
        reader.waits.end_all(error)


def _given(item: Item) -> Outcome:
    if isinstance(item, Outcome):
        return item
    assert item is not None
    raise item
