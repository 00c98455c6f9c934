"""Keys of another type end the worker; lost keys and lost scripts do not. Jobs end once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from omlx_worker.queue.ending import Commit
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.clock import Clock
from tests.helpers.leases import (
    QUEUES,
    claim,
    commit,
    done,
    sweep,
    table,
    tokens,
)
from tests.helpers.redis_server import RedisServer
from tests.helpers.server_time import forward
from tests.helpers.workers import (
    enqueue,
    events,
    fetch,
    is_over,
    queue,
    run_burst,
    running_worker,
    status,
    streamed_text,
    wait_for,
)

WIP = f"rq:wip:{QUEUES[1]}"


@pytest.fixture
def limited(private_server: RedisServer) -> Iterator[Redis]:
    """A connection of a user whose rights a test may take away."""
    with Redis.from_url(private_server.url) as owner:
        owner.execute_command("ACL SETUSER w on >p ~* &* +@all")
    with Redis.from_url(private_server.url.replace("//", "//w:p@")) as connection:
        yield connection


@contextlib.contextmanager
def replaced(connection: Redis, key: str) -> Iterator[None]:
    """The key is of another type while the block runs; what it held comes back."""
    spare = "spare" if connection.exists(key) else None
    if spare:
        connection.rename(key, spare)
    connection.set(key, "of another type")
    yield
    connection.delete(key)
    if spare:
        connection.rename(spare, key)


# Other types


@pytest.mark.usefixtures("server_time")
@pytest.mark.parametrize(
    "key",
    [
        WIP,
        f"rq:queue:{QUEUES[1]}",
        f"rq:finished:{QUEUES[1]}",
        "rq:workers",
        "rq:job:{}",
        "rq:results:{}",
        "omlx:events:{}",
        "omlx:models",
        "omlx:batches",
    ],
)
def test_a_worker_ends_at_a_key_of_another_type_and_the_next_one_ends_each_job_once(
    redis_url: str, connection: Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [enqueue(connection), enqueue(connection, priority="bulk")]
    with (
        replaced(connection, key.format(jobs[0].id)),
        pytest.raises(ResponseError, match="WRONGTYPE"),
    ):
        run_burst(redis_url)
    assert "Traceback" not in caplog.text
    forward(connection, 31)
    with running_worker(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert [len(job.results()) for job in jobs] == [1, 1]


def test_nothing_is_published_of_an_ending_that_redis_refuses(limited: Redis) -> None:
    job = enqueue(limited)
    leases = table(limited)
    (claimed,) = claim(leases)
    limited.execute_command("ACL SETUSER w -zrem")
    with pytest.raises(Exception, match="zrem"):
        commit(leases, claimed, done(job.id))
    assert events(limited, job.id) == []


# Lost keys


def test_a_running_job_outlives_the_loss_of_the_registry_of_started_jobs(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, max_completion_tokens=60)
    with running_worker(redis_url, step_seconds=0.01, lease_seconds=1):
        wait_for(lambda: len(events(connection, job.id)) > 3)
        connection.delete(WIP)
        wait_for(lambda: connection.zcard(WIP) == 1)
        wait_for(lambda: is_over(job))
    assert len(job.results()) == 1
    assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)


@pytest.mark.usefixtures("server_time")
def test_a_job_that_was_taken_away_is_not_held_by_its_old_execution(connection: Redis) -> None:
    job = enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    (old,) = claim(stale)
    forward(connection, 31)
    sweep(fresh)
    claim(fresh)
    connection.delete(WIP)
    assert stale.renew([old]) == {job.id: "started"}
    assert fresh.renew() == {}


def test_a_cancelled_and_requeued_job_is_not_held_by_its_old_execution(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (old,) = claim(leases)
    fetch(connection, job.id).cancel()
    queue(connection).canceled_job_registry.requeue(job.id)
    (new,) = claim(leases)
    assert leases.append([(old, tokens(job.id, 1))]) == {job.id: "started"}
    assert leases.append([(new, tokens(job.id, 1))]) == {}


def test_a_worker_serves_on_after_the_loss_of_all_keys(redis_url: str, connection: Redis) -> None:
    lost = enqueue(connection, max_completion_tokens=5000)
    with running_worker(redis_url, step_seconds=0.005, lease_seconds=1) as worker:
        wait_for(lambda: len(events(connection, lost.id)) > 3)
        connection.flushdb()
        job = enqueue(connection)
        wait_for(lambda: is_over(job))
        assert worker.test_errors == []
    assert status(job) == "finished"


# Lost scripts


def test_jobs_finish_while_the_server_forgets_scripts_all_the_time(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, f"p{n}", max_completion_tokens=20) for n in range(20)]
    over = threading.Event()

    def forget() -> None:
        with Redis.from_url(redis_url) as client:
            while not over.is_set():
                client.script_flush()

    thread = threading.Thread(target=forget)
    thread.start()
    try:
        run_burst(redis_url, step_seconds=0.002)
    finally:
        over.set()
        thread.join()
    assert {status(job) for job in jobs} == {"finished"}
    assert {len(job.results()) for job in jobs} == {1}


# What RQ never removes


def test_ended_jobs_leave_their_registries_when_they_expire(connection: Redis) -> None:
    keys = [f"rq:{registry}:{QUEUES[1]}" for registry in ("finished", "failed")]
    for key in keys:
        connection.zadd(key, {"expired": 1, "kept": 2**40, "endless": -1})
    Upkeep(table(connection), Clock()).attend()
    assert [connection.zrange(key, 0, -1) for key in keys] == [[b"endless", b"kept"]] * 2


def test_cancelled_jobs_leave_their_registry_when_they_are_gone(connection: Redis) -> None:
    kept, expiring, gone = (enqueue(connection) for _ in range(3))
    for job in (kept, expiring, gone):
        job.cancel()
    connection.expire(expiring.key, 500)
    connection.delete(gone.key)
    Upkeep(table(connection), Clock()).attend()
    registry = queue(connection).canceled_job_registry
    assert sorted(registry.get_job_ids()) == sorted([kept.id, expiring.id])
    seconds, _ = connection.time()
    assert 490 < connection.zscore(registry.key, expiring.id) - seconds < 510


# Values that nobody should have written


def test_a_status_that_is_no_text_is_told_like_any_other(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    claim(leases)
    connection.hset(job.key, "status", b"\xff")
    connection.delete(WIP)
    assert leases.renew() == {job.id: "\N{REPLACEMENT CHARACTER}"}


def test_ids_that_are_no_text_stop_no_sweep(redis_url: str, connection: Redis) -> None:
    fields = {"status": "started", "origin": QUEUES[1], "omlx_execution": "omlx-1"}
    connection.hset(b"rq:job:\xff", mapping=fields)
    connection.zadd(WIP, {b"\xff:omlx-1": 1})
    job = enqueue(connection)
    run_burst(redis_url)
    assert status(job) == "finished"


@pytest.mark.parametrize("value", ["soon", "nan", ""])
def test_a_start_that_is_no_time_does_not_keep_a_job_from_ending(
    connection: Redis, value: str
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    connection.hset(f"rq:execution:{job.id}:{claimed.execution}", "created_at", value)
    assert commit(leases, claimed, done(job.id)) is Commit.DONE
    assert job.return_value() == {"text": "abc"}
