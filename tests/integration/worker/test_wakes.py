"""A few idle workers look for each job, and a busy one that has room."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from typing import Any

import pytest
from redis import Redis

from omlx_producer import Producer
from omlx_producer.lua import source
from omlx_producer.wire import wake_channel
from omlx_producer.wire.keys import workers_key
from omlx_worker.control import rq_record, worker
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    fetch,
    is_over,
    running_worker,
    status,
    streamed_text,
    wait_for,
)

WORKERS, SUBMISSIONS = 20, 5


def claiming_clients(connection: Redis) -> set[bytes]:
    """The connections that have claimed since the last reset of the log of calls."""
    calls: Any = connection.slowlog_get(-1)
    return {call["client_address"] for call in calls if claim_digest() in call["command"]}


def claim_digest() -> bytes:
    return hashlib.sha1(source("claim").encode(), usedforsecurity=False).hexdigest().encode()


@pytest.mark.slow
def test_one_submission_among_twenty_idle_workers_wakes_at_most_ten(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_record, "BEAT_SECONDS", 0.2)
    # By chance a ring is heard by none of twenty, once in ninety times; a look comes later then.
    monkeypatch.setattr(rq_record, "random", itertools.cycle((0.1, 0.5, 0.9, 0.3, 0.7)).__next__)
    connection.config_set("slowlog-max-len", 100_000)
    with contextlib.ExitStack() as workers, Producer(redis_url) as producer:
        for _ in range(WORKERS):
            workers.enter_context(running_worker(redis_url))
        wait_for(lambda: connection.hlen(workers_key(ALIAS)) == WORKERS)
        # Once more each of them looks by itself, and counts the others.
        monkeypatch.setattr(worker, "LOOK_SECONDS", 600.0)
        time.sleep(2.5)
        connection.config_set("slowlog-log-slower-than", 0)
        woken = 0
        for _ in range(SUBMISSIONS):
            connection.slowlog_reset()
            producer.submit(model=ALIAS, prompt="x", max_completion_tokens=1).result(timeout=20)
            time.sleep(0.2)
            woken += len(claiming_clients(connection))
        connection.config_set("slowlog-log-slower-than", 10_000)
    assert SUBMISSIONS <= woken <= 10 * SUBMISSIONS


@pytest.mark.parametrize(
    ("payload", "workers"),
    [(b"1", 1), (b"", 1), (b"resume", 1), (b"-3", 1), (b"1", rq_record.FEW), (b"1000", 1000)],
)
def test_a_ring_is_heard_by_a_few_for_each_job(
    redis_url: str,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
    payload: bytes,
    workers: int,
) -> None:
    monkeypatch.setattr(worker, "LOOK_SECONDS", 600.0)
    with running_worker(redis_url) as one:
        wait_for(lambda: connection.hlen(workers_key(ALIAS)) == 1)
        one._workers = dict.fromkeys(one._workers, workers)
        job = enqueue(connection)
        connection.publish(wake_channel(ALIAS), payload)
        wait_for(lambda: is_over(job))


def test_a_worker_with_free_rows_takes_a_job_that_comes_while_it_is_busy(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url, step_seconds=0.02), Producer(redis_url) as producer:
        wait_for(lambda: connection.hlen(workers_key(ALIAS)) == 1)
        long = producer.submit(model=ALIAS, prompt="x", max_completion_tokens=2000)
        wait_for(lambda: streamed_text(connection, long.id))
        producer.submit(model=ALIAS, prompt="y", max_completion_tokens=2, priority="high").result(
            timeout=20
        )
        assert status(fetch(connection, long.id)) == "started"
