"""Redis goes away and comes back: the worker neither dies nor loses or repeats a token."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import RedisError
from rq.job import Job

from tests.redis_server import RedisServer, redis_server
from tests.worker.running import enqueue, events, is_over, running_worker, streamed_text, wait_for


@pytest.fixture
def durable() -> Iterator[RedisServer]:
    with redis_server("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


def all_over(url: str, jobs: list[Job]) -> bool:
    try:
        return all(map(is_over, jobs))
    except RedisError:
        return False


def test_jobs_in_flight_survive_a_restart_of_the_server(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection:
        jobs = [enqueue(connection, f"p{i}", max_completion_tokens=80) for i in range(6)]
        with running_worker(durable.url, max_rows=4, step_seconds=0.01) as worker:
            wait_for(lambda: all(len(events(connection, job.id)) > 3 for job in jobs[:4]))
            durable.kill()
            time.sleep(0.5)
            assert worker.test_thread.is_alive()
            durable.start()
            wait_for(lambda: all_over(durable.url, jobs), 30)
        for job in jobs:
            assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
            assert len(job.results()) == 1


def test_an_idle_worker_serves_again_after_a_restart(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection, running_worker(durable.url) as worker:
        job = enqueue(connection)
        wait_for(lambda: is_over(job))
        durable.stop()
        time.sleep(0.3)
        assert worker.test_thread.is_alive()
        durable.start()
        later = enqueue(connection)
        wait_for(lambda: is_over(later), 30)


def test_a_worker_can_be_stopped_while_redis_is_away(durable: RedisServer) -> None:
    with Redis.from_url(durable.url) as connection:
        job = enqueue(connection, max_completion_tokens=5000)
        with running_worker(durable.url, step_seconds=0.01) as worker:
            wait_for(lambda: len(events(connection, job.id)) > 3)
            durable.kill()
            worker.stop()
            worker.stop()
            worker.test_thread.join(20)
            assert not worker.test_thread.is_alive()
