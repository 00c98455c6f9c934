"""A job that was cancelled while it ran never runs again, whoever heard of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import Redis
from rq import Retry
from rq.job import Job

from omlx_producer import JobCancelled, Producer
from omlx_producer.client import cancel as cancel_module
from omlx_producer.errors import one_line
from omlx_producer.wire.keys import STOP_FIELD
from omlx_worker.queue.ending import Commit
from tests.helpers.fake_engine import BREAKS_PREPARE
from tests.helpers.leases import claim, commit, done, failed, table, tokens
from tests.helpers.server_time import forward
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    queue,
    run_burst,
    running_worker,
    started,
    status,
    wait_for,
)


@pytest.fixture
def cancel_unheard(connection: Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[Job], None]:
    """Cancel a job while no worker hears RQ's command."""

    def cancel(job: Job) -> None:
        monkeypatch.setattr(cancel_module, "send_stop_job_command", lambda *_, **__: None)
        assert Producer(connection).cancel(job.id) == "stopping"

    return cancel


@pytest.mark.usefixtures("server_time")
def test_a_job_cancelled_after_its_worker_died_is_ended_instead_of_run_again(
    redis_url: str, connection: Redis, cancel_unheard: Callable[[Job], None]
) -> None:
    job = enqueue(connection, max_completion_tokens=30)
    dead = table(connection, "dead")
    (claimed,) = claim(dead)
    dead.append([(claimed, tokens(job.id, 2, 2))])
    cancel_unheard(job)
    forward(connection, 31)
    engine = run_burst(redis_url)
    assert engine.most_rows == 0
    assert status(job) == "stopped"
    assert [(event.type, event.n) for event in events(connection, job.id)] == [
        ("tokens", 2),
        ("cancelled", 2),
    ]
    with pytest.raises(JobCancelled, match="cancelled while it ran"):
        Producer(connection).result(job.id)
    assert started(connection) == queue(connection).count == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_running_job_stops_without_the_command(
    redis_url: str, connection: Redis, cancel_unheard: Callable[[Job], None], stream: bool
) -> None:
    job = enqueue(connection, max_completion_tokens=5000, stream=stream)
    neighbour = enqueue(connection, max_completion_tokens=50)
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: len(events(connection, neighbour.id)) > 3)
        cancel_unheard(job)
        wait_for(lambda: is_over(job), 3)
        wait_for(lambda: is_over(neighbour))
    assert (status(job), status(neighbour)) == ("stopped", "finished")
    assert [event.type for event in events(connection, job.id)].count("cancelled") == 1


def test_a_renewal_tells_of_a_job_that_waits_for_its_prompt_to_be_read(
    connection: Redis, cancel_unheard: Callable[[Job], None]
) -> None:
    told = []
    leases = table(connection)
    leases._on_stop = told.append
    job = enqueue(connection)
    (claimed,) = claim(leases)
    cancel_unheard(job)
    assert leases.renew() == leases.renew() == {}
    assert told == [claimed]


def test_a_cancelled_job_is_not_retried(
    redis_url: str, connection: Redis, cancel_unheard: Callable[[Job], None]
) -> None:
    job = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=3))
    dead = table(connection, "dead")
    claim(dead)
    cancel_unheard(job)
    connection.hset(job.key, "status", "queued")
    connection.rpush(queue(connection).key, job.id)
    connection.delete(queue(connection).started_job_registry.key)
    run_burst(redis_url)
    assert status(job) == "stopped"


def test_the_wish_ends_with_the_job_so_that_it_can_be_requeued(
    redis_url: str, connection: Redis, cancel_unheard: Callable[[Job], None]
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    cancel_unheard(job)
    commit(leases, claimed, failed(job.id))
    assert connection.hget(job.key, STOP_FIELD) is None
    job.refresh()
    job.requeue()
    run_burst(redis_url)
    assert status(job) == "finished"


def test_a_job_that_has_just_finished_is_not_marked(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    job.refresh()
    commit(leases, claimed, done(job.id))
    assert not cancel_module._mark(connection, job)
    assert connection.hget(job.key, STOP_FIELD) is None
    assert Producer(connection).cancel(job.id) == "over"


def test_a_job_given_back_with_the_wish_is_cancelled_for_good_by_a_second_cancel(
    redis_url: str, connection: Redis, cancel_unheard: Callable[[Job], None]
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    cancel_unheard(job)
    leases.give_back([claimed])
    assert Producer(connection).cancel(job.id) == "cancelled"
    assert run_burst(redis_url).most_rows == 0
    assert status(job) == "canceled"


def test_a_result_that_comes_after_rqs_cancel_is_dropped_and_the_stream_ends(
    connection: Redis,
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    leases.append([(claimed, tokens(job.id, 2, 2))])
    job.refresh()
    job.cancel()
    assert commit(leases, claimed, done(job.id)) is Commit.LOST
    assert [event.type for event in events(connection, job.id)] == ["tokens", "cancelled"]


def test_sentences_are_one_line_whatever_they_quote() -> None:
    assert one_line("a\nb\x0b\tc \ud800") == "a b c \\ud800"
    assert len(one_line("x" * 10_000)) == 1000
