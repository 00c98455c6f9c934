"""Real worker processes and real signals."""

from __future__ import annotations

import signal
import time

from redis import Redis

from omlx_producer.wire import MODELS_KEY
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    queue,
    running_worker,
    status,
    streamed_text,
    wait_for,
    worker_process,
)


def test_a_job_whose_worker_is_killed_runs_again_and_finishes_once(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, f"p{i}", max_completion_tokens=60) for i in range(3)]
    with worker_process(redis_url) as victim:
        wait_for(lambda: all(len(events(connection, job.id)) > 5 for job in jobs))
        before = {job.id: events(connection, job.id) for job in jobs}
        victim.kill()
        victim.wait(10)
    assert [status(job) for job in jobs] == ["started"] * 3
    killed = time.monotonic()
    with worker_process(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert time.monotonic() - killed < 10
    for job in jobs:
        assert status(job) == "finished"
        assert len(job.results()) == 1
        after = events(connection, job.id)
        assert after[: len(before[job.id])] == before[job.id]
        assert [event.type for event in after].count("done") == 1
        position = 0
        for event in after[:-1]:
            assert event.since == position
            position = event.n
        assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)


def test_a_worker_that_was_paused_past_its_lease_writes_nothing_more(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, max_completion_tokens=150)
    with worker_process(redis_url) as paused:
        wait_for(lambda: len(events(connection, job.id)) > 5)
        paused.send_signal(signal.SIGSTOP)
        registry = queue(connection).started_job_registry
        first = connection.zrange(registry.key, 0, -1)
        with worker_process(redis_url):
            wait_for(lambda: connection.zrange(registry.key, 0, -1) not in ([], first))
            paused.send_signal(signal.SIGCONT)
            wait_for(lambda: is_over(job))
    assert len(job.results()) == 1
    assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
    counts = [event.n for event in events(connection, job.id)]
    assert counts == sorted(counts)


def test_sigterm_finishes_what_runs_and_leaves_the_rest_queued(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=80) for _ in range(7)]
    with worker_process(redis_url) as worker:
        wait_for(lambda: all(len(events(connection, job.id)) > 2 for job in jobs[:4]))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(15) == 0
    assert [status(job) for job in jobs] == ["finished"] * 4 + ["queued"] * 3
    assert connection.smembers("rq:workers") == set()


def test_a_drain_that_takes_too_long_gives_running_jobs_back(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=5000) for _ in range(6)]
    with worker_process(redis_url, drain_timeout=0.5) as worker:
        wait_for(lambda: all(len(events(connection, job.id)) > 2 for job in jobs[:4]))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(15) == 0
    assert [status(job) for job in jobs] == ["queued"] * 6
    waiting = connection.lrange(queue(connection).key, 0, -1)
    assert waiting == [job.id.encode() for job in jobs]


def test_a_second_signal_stops_at_once_and_gives_leases_back(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=5000) for _ in range(6)]
    with worker_process(redis_url) as worker:
        wait_for(lambda: all(len(events(connection, job.id)) > 2 for job in jobs[:4]))
        worker.send_signal(signal.SIGINT)
        time.sleep(0.1)
        began = time.monotonic()
        worker.send_signal(signal.SIGINT)
        assert worker.wait(15) == 128 + signal.SIGINT
        assert time.monotonic() - began < 3
    assert [status(job) for job in jobs] == ["queued"] * 6
    assert connection.zcard(queue(connection).started_job_registry.key) == 0


def test_a_second_signal_does_not_wait_for_a_long_step(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection)
    with worker_process(redis_url, step_seconds=30) as worker:
        wait_for(lambda: status(job) == "started")
        time.sleep(0.3)
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(10) == 128 + signal.SIGTERM
    assert status(job) == "queued"


def test_an_idle_worker_ends_on_sigterm(redis_url: str, connection: Redis) -> None:
    with worker_process(redis_url) as worker:
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(10) == 0


def test_a_job_given_back_goes_on_where_it_stood_also_when_it_does_not_stream(
    redis_url: str, connection: Redis
) -> None:
    jobs = [
        enqueue(connection, "a", "bulk", max_completion_tokens=400),
        enqueue(connection, "b", "default", max_completion_tokens=400, n=2),
    ]
    with worker_process(redis_url, drain_timeout=0.0) as worker:
        wait_for(lambda: len(events(connection, jobs[1].id)) > 20)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(15) == 0
    assert [status(job) for job in jobs] == ["queued"] * 2
    progress = [events(connection, job.id)[-1].n for job in jobs]
    assert len(events(connection, jobs[0].id)) == 1
    assert min(progress) > 10

    with running_worker(redis_url) as second:
        wait_for(lambda: all(map(is_over, jobs)))
        produced = second.decode_thread.counters.tokens
    usage = [job.return_value()["usage"]["completion_tokens"] for job in jobs]
    # A token may be in a stream twice counted: text held back for a stop token counts as one.
    assert sum(usage) - sum(progress) <= produced <= sum(usage) - sum(progress) + 3
    for job in jobs:
        for choice in job.return_value()["choices"]:
            assert choice["text"] == streamed_text(connection, job.id, choice["index"])


def test_a_worker_starts_under_the_name_of_one_that_was_killed(
    redis_url: str, connection: Redis
) -> None:
    with worker_process(redis_url, name="studio-1") as victim:
        wait_for(lambda: connection.exists("rq:worker:studio-1"))
        victim.kill()
        victim.wait(10)
    assert connection.exists("rq:worker:studio-1")
    job = enqueue(connection)
    with worker_process(redis_url, name="studio-1"):
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"


def test_a_worker_does_not_start_under_the_name_of_one_that_lives(
    redis_url: str, connection: Redis
) -> None:
    with worker_process(redis_url, name="studio-1") as first:
        wait_for(lambda: connection.exists("rq:worker:studio-1"))
        with worker_process(redis_url, name="studio-1") as second:
            assert second.wait(15) not in (0, None)
        assert first.poll() is None
        job = enqueue(connection)
        wait_for(lambda: is_over(job))
