"""Jobs are prepared beside the main thread: claims, signals and heartbeats do not wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from redis import Redis
from rq import Worker
from rq.command import send_stop_job_command
from rq.serializers import JSONSerializer

from omlx_producer import Producer
from omlx_producer.wire import GenerationRequest
from omlx_worker.control import admission, rq_record
from omlx_worker.control.admission import MOST_COMING
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.engine.rows.request import RowRequest
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    fetch,
    is_over,
    queue,
    running_worker,
    started,
    status,
    wait_for,
)


class Gate:
    """Holds up what prepares prompts that begin with "slow".

    Attributes:
        begun: the prompts that were to be prepared, in order.
    """

    def __init__(self, worker: GenerationWorker) -> None:
        self.begun: list[str] = []
        self._passes = threading.Semaphore(0)
        self._prepare = worker.test_engine.prepare
        worker.test_engine.prepare = self.prepare

    def prepare(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        prompt = str(request.prompt)
        self.begun.append(prompt)
        if prompt.startswith("slow"):
            assert self._passes.acquire(timeout=60)
        return self._prepare(request, job_id)

    def open(self, jobs: int = 1000) -> None:
        self._passes.release(jobs)


@contextmanager
def gated_worker(url: str, **options: object) -> Iterator[tuple[GenerationWorker, Gate]]:
    with running_worker(url, **options) as worker:
        gate = Gate(worker)
        try:
            yield worker, gate
        finally:
            gate.open()


def submit(url: str, prompts: list[str]) -> list[str]:
    """Submit jobs at once; returns their ids."""
    requests = [GenerationRequest(model=ALIAS, prompt=prompt) for prompt in prompts]
    with Producer(url) as producer:
        return [job.id for job in producer.submit_many(requests, require_known_model=False)]


def test_a_job_that_is_slow_to_prepare_holds_up_no_job_of_another_queue(
    redis_url: str, connection: Redis
) -> None:
    with gated_worker(redis_url) as (_, gate):
        slow = enqueue(connection, "slow", max_completion_tokens=3)
        wait_for(lambda: gate.begun == ["slow"])
        others = [enqueue(connection, "x", level) for level in ("high", "bulk")]
        wait_for(lambda: all(map(is_over, others)))
        assert status(slow) == "started"
        gate.open()
        wait_for(lambda: is_over(slow))
        assert status(slow) == "finished"


def test_jobs_that_are_claimed_together_are_read_in_one_window(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "GATHER_SECONDS", 20.0)
    with gated_worker(redis_url) as (worker, gate):
        jobs = submit(redis_url, [f"slow {i}" for i in range(5)])
        for _ in jobs:
            time.sleep(0.05)  # what was prepared could be read meanwhile
            gate.open(1)
        wait_for(lambda: all(fetch(connection, job).is_finished for job in jobs))
        assert worker.decode_thread.counters.prompt_windows == 1


def test_a_ready_job_does_not_wait_long_for_one_that_was_claimed_with_it(
    redis_url: str, connection: Redis
) -> None:
    with gated_worker(redis_url) as (_, gate):
        ready, slow = [fetch(connection, job) for job in submit(redis_url, ["x", "slow"])]
        wait_for(lambda: is_over(ready))
        assert (sorted(gate.begun), status(slow)) == (["slow", "x"], "started")


def test_jobs_of_one_queue_run_in_the_order_of_their_claims(
    redis_url: str, connection: Redis
) -> None:
    with gated_worker(redis_url) as (worker, gate):
        jobs = [enqueue(connection, prompt) for prompt in ("slow", "b", "c")]
        wait_for(lambda: sorted(gate.begun) == ["b", "c", "slow"])
        assert worker.decode_thread.counters.tokens == 0
        gate.open()
        wait_for(lambda: all(map(is_over, jobs)))


def test_a_high_job_is_claimed_and_prepared_before_the_others_that_wait(
    redis_url: str, connection: Redis
) -> None:
    with gated_worker(redis_url, max_rows=100) as (_, gate):
        bulk = [enqueue(connection, f"slow {i}", "bulk") for i in range(40)]
        wait_for(lambda: len(gate.begun) == 2 and started(connection) > MOST_COMING // 2)
        high = enqueue(connection, "x", "high")
        wait_for(lambda: status(high) == "started")
        assert len(gate.begun) == 2
        assert queue(connection, "bulk").count >= 40 - MOST_COMING
        while not is_over(high):
            gate.open(1)
            time.sleep(0.1)
        # A thread may take one more before the main thread has put it in.
        assert gate.begun.index("x") < 6
        gate.open()
        wait_for(lambda: all(map(is_over, bulk)))


@pytest.mark.slow
def test_the_worker_beats_and_renews_while_all_that_it_has_is_being_prepared(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rq_record, "BEAT_SECONDS", 0.1)

    def beat() -> object:
        [worker] = Worker.all(connection=connection)
        return worker.last_heartbeat

    with gated_worker(redis_url, lease_seconds=1.0) as (_, gate):
        jobs = [enqueue(connection, f"slow {i}") for i in range(3)]
        wait_for(lambda: len(gate.begun) == 2)
        ends, first = time.monotonic() + 2, beat()
        wait_for(lambda: beat() != first and time.monotonic() > ends)
        gate.open()
        wait_for(lambda: all(map(is_over, jobs)))
        assert sorted(gate.begun) == ["slow 0", "slow 1", "slow 2"], "no lease has expired"


def test_a_stop_gives_back_what_is_being_prepared(redis_url: str, connection: Redis) -> None:
    with gated_worker(redis_url) as (worker, gate):
        jobs = [enqueue(connection, f"slow {i}") for i in range(5)]
        wait_for(lambda: len(gate.begun) == 2)
        worker.stop()
        worker.test_thread.join(10)
        assert not worker.test_thread.is_alive(), "it does not wait for what it prepares"
        assert queue(connection).job_ids == [job.id for job in jobs]
    with running_worker(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert {status(job) for job in jobs} == {"finished"}


def test_a_job_can_be_stopped_while_it_is_prepared(redis_url: str, connection: Redis) -> None:
    with gated_worker(redis_url) as (worker, gate):
        job = enqueue(connection, "slow")
        behind = enqueue(connection, "x")
        wait_for(lambda: len(gate.begun) == 2)
        send_stop_job_command(connection, job.id, serializer=JSONSerializer)
        wait_for(lambda: is_over(job) and is_over(behind))
        assert (status(job), status(behind)) == ("stopped", "finished")
        gate.open()
        assert worker.test_errors == []
    assert status(job) == "stopped"


def test_a_job_can_be_cancelled_while_it_is_prepared(redis_url: str, connection: Redis) -> None:
    with gated_worker(redis_url) as (worker, gate):
        job = enqueue(connection, "slow")
        wait_for(lambda: len(gate.begun) == 1)
        job.cancel()
        gate.open()
        other = enqueue(connection, "x")
        wait_for(lambda: is_over(other))
        assert worker.test_errors == []
    assert status(job) in ("canceled", "stopped")


def test_a_jobs_timeout_counts_while_it_is_prepared(redis_url: str, connection: Redis) -> None:
    with gated_worker(redis_url) as (_, gate):
        job = enqueue(connection, "slow", job_timeout=1)
        wait_for(lambda: is_over(job))
        assert gate.begun == ["slow"]
    assert status(job) == "failed"
    assert "longer than its timeout of 1 s" in events(connection, job.id)[-1].error


@pytest.mark.parametrize("level", ["high", "default", "bulk"])
def test_more_jobs_than_wait_at_once_are_all_served(
    redis_url: str, connection: Redis, level: str
) -> None:
    jobs = [enqueue(connection, f"{i}", level) for i in range(3 * MOST_COMING)]
    with running_worker(redis_url, max_rows=100):
        wait_for(lambda: all(map(is_over, jobs)))
    assert {status(job) for job in jobs} == {"finished"}
