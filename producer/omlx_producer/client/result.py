"""Waits for the end of a job.

A sync wait reads the job's own results, on a connection of its own. All waits of an asyncio client
share one read: the script that ends a job adds an entry to the stream of its submitter's group.
Other tools end jobs without an entry, so waits also look at their jobs after a silence.
"""

from __future__ import annotations

import asyncio
import math
import time

import redis
import redis.asyncio
from redis.exceptions import RedisError
from rq.job import Job

from omlx_producer.client.outcome import (
    Outcome,
    ask_result,
    find_outcome,
    require_job_id,
    results_key,
    timed_out,
)
from omlx_producer.client.reader import AsyncReader
from omlx_producer.connection import block_seconds
from omlx_producer.outage import Reconnection
from omlx_producer.wire import GROUP_FIELD, ended_key

LOOK_SECONDS = 15.0
# A wait looks at its job once, however short its timeout is, unless the server hangs.
FIRST_LOOK_SECONDS = 1.0


def wait_for_end(connection: redis.Redis, job_id: str, timeout: float | None) -> Outcome:
    """Wait for the end of a job; see `Producer.result` for the errors."""
    require_job_id(job_id)
    outage, until = Reconnection(), time.monotonic() + (math.inf if timeout is None else timeout)
    while True:
        try:
            status, entries = ask_result(connection.pipeline(), job_id).execute()
            outage.answered()
            if outcome := find_outcome(job_id, status, entries):
                return outcome
            pause = min(block_seconds(connection), until - time.monotonic())
            if pause > 0:
                last = entries[0][0] if entries else "0-0"
                connection.xread({results_key(job_id): last}, block=max(1, int(1000 * pause)))
        except RedisError as error:
            time.sleep(max(0.0, min(outage.failed(error), until - time.monotonic())))
        if time.monotonic() >= until:
            raise timed_out(job_id, timeout)


async def wait_for_end_async(
    connection: redis.asyncio.Redis, job_id: str, timeout: float | None
) -> Outcome:
    """The form of `wait_for_end` for an event loop."""
    require_job_id(job_id)
    outage, now = Reconnection(), asyncio.get_running_loop().time()
    deadline = None if timeout is None else now + timeout
    look_by = None if deadline is None else max(deadline, now + FIRST_LOOK_SECONDS)
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
                    await inbox.read(key, (since, 0), LOOK_SECONDS)
                except RedisError as error:
                    limit.reschedule(deadline)
                    await asyncio.sleep(outage.failed(error))
    except TimeoutError:
        raise timed_out(job_id, timeout) from None
