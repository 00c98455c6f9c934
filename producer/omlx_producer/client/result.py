"""Waits for the end of a job."""

from __future__ import annotations

import math
import time

import redis
from redis.exceptions import RedisError

from omlx_producer.client.outcome import (
    answer_of,
    ask_result,
    find_end,
    require_job_id,
    require_timeout,
    results_key,
    timed_out,
)
from omlx_producer.connection import block_seconds
from omlx_producer.outage import Reconnection
from omlx_producer.wire import Completion


def wait_for_end(connection: redis.Redis, job_id: str, timeout: float | None) -> Completion:
    """Wait for the result of a job; see `Producer.result` for the errors.

    It reads the job's results, on a connection of its own, and looks at the job after a silence:
    other tools end jobs without a result.
    """
    require_job_id(job_id)
    require_timeout(timeout)
    outage, until = Reconnection(), time.monotonic() + (math.inf if timeout is None else timeout)
    while True:
        try:
            status, entries = ask_result(connection.pipeline(), job_id).execute()
            outage.answered()
            if end := find_end(job_id, status, entries):
                return answer_of(job_id, end)
            pause = min(block_seconds(connection), until - time.monotonic())
            if pause > 0:
                last = entries[0][0] if entries else "0-0"
                connection.xread({results_key(job_id): last}, block=max(1, int(1000 * pause)))
        except RedisError as error:
            time.sleep(max(0.0, min(outage.failed(error), until - time.monotonic())))
        if time.monotonic() >= until:
            raise timed_out(job_id, timeout)
