"""Every way in which a bulk run's job can end is told on the run's stream, and no other job is."""

from __future__ import annotations

import redis
from rq import Retry

from omlx_producer.protocol import bulk_job_id, ended_stream
from tests.helpers.workers import enqueue, is_over, run_burst, running_worker, wait_for

RUN = "00000000beef"
JOB = bulk_job_id(RUN, "cafe")


def told(connection: redis.Redis) -> list[bytes]:
    return [fields[b"job"] for _, fields in connection.xrange(str(ended_stream(JOB)))]


def test_a_job_that_finishes(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, job_id=JOB)
    run_burst(redis_url)
    assert told(connection) == [JOB.encode()]
    assert connection.ttl(str(ended_stream(JOB))) > 86_400


def test_a_job_that_fails(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, job_id=JOB, max_completion_tokens=50_000)
    run_burst(redis_url)
    assert told(connection) == [JOB.encode()]


def test_a_job_that_rqs_own_handlers_end(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, job_id=JOB, retry=Retry(max=1))
    run_burst(redis_url)
    assert told(connection) == [JOB.encode()]


def test_a_job_that_is_cancelled_while_it_runs(redis_url: str, connection: redis.Redis) -> None:
    with running_worker(redis_url, step_seconds=0.02):
        job = enqueue(connection, job_id=JOB, max_completion_tokens=5_000)
        wait_for(lambda: job.get_status() == "started")
        job.cancel()
        wait_for(lambda: told(connection) == [JOB.encode()])
    assert is_over(job)


def test_other_jobs_are_not_told_of(redis_url: str, connection: redis.Redis) -> None:
    assert ended_stream("4f0c") is None
    enqueue(connection, job_id="other-job")
    run_burst(redis_url)
    assert not list(connection.scan_iter("omlx:bulk:*"))
