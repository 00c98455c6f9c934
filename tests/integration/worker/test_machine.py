"""A worker whose machine is about to sleep."""

from __future__ import annotations

import pytest
from redis import Redis

from omlx_worker.mac.machine import Mac
from tests.helpers.workers import (
    enqueue,
    is_over,
    running_worker,
    started,
    wait_for,
)


@pytest.mark.slow
def test_the_machine_is_kept_awake_while_jobs_run(redis_url: str, connection: Redis) -> None:
    told: list[bool] = []

    class Told(Mac):
        def keep_awake(self, busy: bool) -> None:
            told.append(busy)

    with running_worker(redis_url, step_seconds=0.01, machine=Told()):
        wait_for(lambda: told)
        assert not any(told)
        job = enqueue(connection, max_completion_tokens=30)
        wait_for(lambda: told[-1])
        wait_for(lambda: is_over(job) and not told[-1])
        enqueue(connection, max_completion_tokens=9_000)
        wait_for(lambda: started(connection) and told[-1])
    assert not told[-1], "and not once the worker has ended"
