"""A job that kills its workers ends as failed; those that ran beside it do not."""

from __future__ import annotations

import subprocess
import sys

from redis import Redis

from tests.helpers.run_deadly_worker import DEADLY, SCRIPT
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    queue,
    status,
    streamed_text,
    wait_for,
)


def supervise(url: str, jobs: list, most_deaths: int) -> int:
    """Start the worker anew whenever it dies, until all jobs are over; returns its deaths."""
    for deaths in range(most_deaths + 1):
        worker = subprocess.Popen([sys.executable, str(SCRIPT), url, ""])
        try:
            wait_for(lambda w=worker: w.poll() is not None or all(map(is_over, jobs)), 30)
            if worker.poll() is None:
                return deaths
        finally:
            worker.kill()
            worker.wait(10)
    raise AssertionError(f"the worker died {most_deaths + 1} times")


def test_a_poison_job_fails_after_three_deaths_alone_and_its_neighbours_finish(
    redis_url: str, connection: Redis
) -> None:
    innocents = [enqueue(connection, f"p{n}", max_completion_tokens=30) for n in range(2)]
    poison = enqueue(connection, DEADLY)
    innocents += [enqueue(connection, f"p{n}", max_completion_tokens=30) for n in range(2, 4)]
    assert supervise(redis_url, [poison, *innocents], most_deaths=5) == 5
    assert status(poison) == "failed"
    assert poison in queue(connection).failed_job_registry
    sentence = poison.latest_result().exc_string
    assert "worker died 5 times while it ran, 3 times with no other job" in sentence
    assert events(connection, poison.id)[-1].error == sentence
    for job in innocents:
        assert status(job) == "finished"
        assert len(job.results()) == 1
        assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)


def test_a_poison_job_that_is_requeued_by_hand_gets_its_deaths_again(
    redis_url: str, connection: Redis
) -> None:
    poison = enqueue(connection, DEADLY)
    for _ in range(2):
        assert supervise(redis_url, [poison], most_deaths=5) == 5
        poison.refresh()
        poison.requeue()
    assert connection.hget(poison.key, "omlx_deaths") is None


def test_retries_are_not_spent_on_a_poison_job(redis_url: str, connection: Redis) -> None:
    from rq import Retry

    poison = enqueue(connection, DEADLY, retry=Retry(max=3))
    assert supervise(redis_url, [poison], most_deaths=5) == 5
    assert status(poison) == "failed"
    assert len(poison.results()) == 1
