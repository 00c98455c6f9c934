"""Keys of another type, lost keys and lost scripts: jobs end once, and workers serve on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.row import Row
from omlx_worker.queue import lua
from omlx_worker.queue.ending import Commit
from omlx_worker.queue.lease import SWEEP_LOCK, LeaseTable
from tests.helpers.leases import QUEUES, claim, commit, done, expire, failed, kill, table, tokens
from tests.helpers.redis_server import RedisServer
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
SHARED = [
    f"rq:finished:{QUEUES[1]}",
    f"rq:failed:{QUEUES[1]}",
    f"rq:canceled:{QUEUES[1]}",
    f"rq:scheduled:{QUEUES[1]}",
    f"rq:workers:{QUEUES[1]}",
    f"rq:wip:{QUEUES[2]}",
    f"rq:queue:{QUEUES[2]}",
    "rq:workers",
    "omlx:models",
    "omlx:workers:fake",
]


@pytest.fixture(autouse=True)
def _nothing_was_reported_before() -> None:
    lua.report.cache_clear()


@pytest.fixture
def limited(private_server: RedisServer) -> Iterator[Redis]:
    """A connection of a user whose rights a test may take away."""
    with Redis.from_url(private_server.url) as owner:
        owner.execute_command("ACL SETUSER w on >p ~* &* +@all")
    with Redis.from_url(private_server.url.replace("//", "//w:p@")) as connection:
        yield connection


def reports(caplog: pytest.LogCaptureFixture, key: str) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    return [message for message in said if key in message]


def sweep(leases: LeaseTable) -> list[str]:
    """Sweep, whoever has swept before."""
    leases.connection.delete(f"{SWEEP_LOCK}:{QUEUES[0]}")
    return leases.sweep()


# Other types


@pytest.mark.parametrize("key", SHARED)
def test_jobs_end_once_and_the_worker_serves_on_beside_a_shared_key_of_another_type(
    redis_url: str, connection: Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection.set(key, "of another type")
    good, bad = enqueue(connection), enqueue(connection, n="two")
    dependency = enqueue(connection)
    dependent = enqueue(connection, depends_on=dependency)

    run_burst(redis_url)

    assert [status(job) for job in (good, bad, dependent)] == ["finished", "failed", "finished"]
    assert len(good.results()) == len(bad.results()) == 1
    assert [event.type for event in events(connection, good.id)][-1] == "done"
    assert connection.get(key) == b"of another type"
    assert connection.keys("rq:execution:*") == []
    assert reports(caplog, key)
    assert "Traceback" not in caplog.text


def test_a_key_of_another_type_is_logged_once_with_its_type_and_the_remedy(
    connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"rq:finished:{QUEUES[1]}"
    connection.set(key, "of another type")
    leases = table(connection)
    for _ in range(2):
        job = enqueue(connection)
        (claimed,) = claim(leases)
        assert commit(leases, claimed, done(job.id)) is Commit.DONE
    (said,) = reports(caplog, key)
    assert "(string)" in said
    assert "delete it with DEL, or rename it" in said


@pytest.mark.parametrize("key", [WIP, f"rq:queue:{QUEUES[1]}"])
def test_a_queue_with_an_essential_key_of_another_type_waits_and_others_are_served(
    redis_url: str, connection: Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = enqueue(connection)
    served = [enqueue(connection, priority=priority) for priority in ("high", "bulk")]
    if key == WIP:
        connection.set(key, "of another type")
    else:
        connection.rename(key, "spare")
        connection.hset(key, "of another", "type")

    with running_worker(redis_url) as worker:
        wait_for(lambda: all(map(is_over, served)))
        assert status(waiting) == "queued"
        connection.delete(key)
        if key != WIP:
            connection.rename("spare", key)
        wait_for(lambda: is_over(waiting))
        assert worker.test_errors == []
    assert len(reports(caplog, key)) == 1


@pytest.mark.parametrize("ending", [done, failed])
def test_running_jobs_end_while_the_registry_of_started_jobs_is_of_another_type(
    connection: Redis, ending: object
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    connection.delete(WIP)
    connection.set(WIP, "of another type")
    assert leases.append([(claimed, tokens(job.id, 1))]) == {}
    assert leases.renew() == {}
    assert leases.sweep() == []
    assert commit(leases, claimed, ending(job.id)) is Commit.DONE
    assert is_over(job)
    assert connection.keys("rq:execution*") == []


def test_a_job_whose_queue_is_of_another_type_keeps_its_lease_until_it_can_return(
    connection: Redis,
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    claim(leases)
    connection.set(queue(connection).key, "of another type")
    kill(connection, leases)
    assert status(job) == "started"
    connection.delete(queue(connection).key)
    assert table(connection, "other").sweep() == [job.id]


@pytest.mark.parametrize("key", ["rq:job:{}", "rq:execution:{}:{}", "rq:executions:{}"])
def test_a_renewal_survives_keys_of_another_type(connection: Redis, key: str) -> None:
    jobs = [enqueue(connection) for _ in range(2)]
    leases = table(connection)
    claimed = claim(leases, 2)
    key = key.format(jobs[0].id, claimed[0].execution)
    connection.delete(key)
    connection.set(key, "of another type")
    assert leases.renew() == ({jobs[0].id: "deleted"} if "rq:job:" in key else {})
    assert leases.holds(claimed[1])


def test_a_claim_replaces_its_own_key_of_another_type(connection: Redis) -> None:
    job = enqueue(connection)
    connection.hset("omlx:claim:worker-a", "of another", "type")
    assert [claimed.id for claimed in claim(table(connection))] == [job.id]
    assert connection.type("omlx:claim:worker-a") == b"list"


def test_a_job_whose_hash_is_replaced_while_it_is_prepared_stops_nobody(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url) as worker:
        prepare = worker.test_engine.prepare

        def replaced(request: GenerationRequest, job_id: str) -> list[Row]:
            connection.set(f"rq:job:{job_id}", "of another type")
            return prepare(request, job_id)

        worker.test_engine.prepare = replaced
        job = enqueue(connection, completion_window="1h")
        wait_for(lambda: connection.type(job.key) == b"string")
        worker.test_engine.prepare = prepare
        other = enqueue(connection, completion_window="1h")
        wait_for(lambda: is_over(other))
        assert worker.test_errors == []


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


def test_a_job_that_was_taken_away_is_not_held_by_its_old_execution(connection: Redis) -> None:
    job = enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    (old,) = claim(stale)
    expire(connection, stale)
    fresh.sweep()
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


def test_a_job_whose_worker_died_without_the_registry_returns_to_its_queue(
    connection: Redis,
) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    claim(table(connection, "dead"), 2)
    alive = table(connection, "alive")
    claim(alive)
    connection.delete(WIP)
    other = table(connection, "other")
    alive.renew()
    assert sweep(other) == []
    for job in jobs[:2]:
        # As after a lease and a minute.
        connection.delete(f"rq:executions:{job.id}")
    assert sorted(sweep(other)) == sorted(job.id for job in jobs[:2])
    assert [status(job) for job in jobs] == ["queued", "queued", "started"]
    assert connection.hget(jobs[0].key, "omlx_deaths") == b"1"


def test_abandoned_jobs_are_found_among_many_keys_a_part_at_a_time(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(10)]
    claim(table(connection, "dead"), 10)
    connection.delete(WIP, *(f"rq:executions:{job.id}" for job in jobs))
    connection.mset({f"filler:{n}": n for n in range(20_000)})
    leases = table(connection)
    found = [sweep(leases) for _ in range(40)]
    assert max(map(len, found)) < 10
    assert sorted(job_id for ids in found for job_id in ids) == sorted(job.id for job in jobs)


def test_jobs_of_a_deleted_queue_run_after_all(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    connection.delete(queue(connection).key)
    assert sorted(sweep(table(connection))) == sorted(job.id for job in jobs)
    assert sweep(table(connection)) == []
    run_burst(redis_url)
    assert {status(job) for job in jobs} == {"finished"}
    assert {len(job.results()) for job in jobs} == {1}


def test_one_worker_looks_for_lost_jobs_for_all(connection: Redis) -> None:
    assert sweep(table(connection, "first")) == []
    job = enqueue(connection)
    connection.delete(queue(connection).key)
    assert table(connection, "second").sweep() == []
    assert sweep(table(connection, "second")) == [job.id]


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


def test_ended_jobs_leave_their_registries_when_they_expire(
    redis_url: str, connection: Redis
) -> None:
    keys = [f"rq:{registry}:{QUEUES[1]}" for registry in ("finished", "failed")]
    for key in keys:
        connection.zadd(key, {"expired": 1, "kept": 2**40, "endless": -1})
    run_burst(redis_url)
    assert [connection.zrange(key, 0, -1) for key in keys] == [[b"endless", b"kept"]] * 2


def test_cancelled_jobs_leave_their_registry_when_they_are_gone(
    redis_url: str, connection: Redis
) -> None:
    kept, expiring, gone = (enqueue(connection) for _ in range(3))
    for job in (kept, expiring, gone):
        job.cancel()
    connection.expire(expiring.key, 500)
    connection.delete(gone.key)
    run_burst(redis_url)
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


def test_ids_that_are_no_text_stop_neither_sweeps_nor_schedules(
    redis_url: str, connection: Redis
) -> None:
    for status_, execution in ((b"started", b"omlx-1"), (b"scheduled", b"")):
        odd = b"\xff" + status_
        fields = {"status": status_, "origin": QUEUES[1], "omlx_execution": execution}
        connection.hset(b"rq:job:" + odd, mapping=fields)
        connection.zadd(WIP, {odd + b":omlx-1": 1})
        connection.zadd(f"rq:scheduled:{QUEUES[1]}", {odd: 1})
    connection.hset(b"rq:job:\xfe", mapping={**fields, "status": "started"})
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
