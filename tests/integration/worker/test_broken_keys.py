"""Keys of another type, lost keys and lost scripts: jobs end once, and workers serve on."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.rows.row import Row
from omlx_worker.queue import lua
from omlx_worker.queue.ending import Commit, Ending
from tests.helpers.leases import (
    QUEUES,
    claim,
    commit,
    done,
    expire,
    failed,
    kill,
    sweep,
    table,
    tokens,
)
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
NEEDED = [WIP, *(f"rq:{name}:{QUEUES[1]}" for name in ("queue", "finished", "failed", "scheduled"))]
SHARED = [
    f"rq:canceled:{QUEUES[1]}",
    f"rq:ready:{QUEUES[1]}",
    f"rq:workers:{QUEUES[1]}",
    f"rq:wip:{QUEUES[2]}",
    f"rq:queue:{QUEUES[2]}",
    "rq:workers",
    "omlx:models",
    "omlx:workers:fake",
    "omlx:paused",
    "omlx:batches",
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


def test_a_key_of_another_type_is_logged_once_with_its_name_its_type_and_the_remedy(
    connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"rq:finished:{QUEUES[1]}"
    enqueue(connection)
    connection.set(key, "of another type")
    leases = table(connection)
    assert claim(leases) == claim(leases) == []
    (said,) = reports(caplog, key)
    assert f"the Redis key {key} is a string" in said
    assert "delete it with DEL, or rename it" in said


@pytest.mark.parametrize("key", NEEDED)
def test_a_queue_with_a_key_of_another_type_waits_and_others_are_served(
    redis_url: str, connection: Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = enqueue(connection)
    served = [enqueue(connection, priority=priority) for priority in ("high", "bulk")]
    with running_worker(redis_url) as worker:
        with replaced(connection, key):
            wait_for(lambda: all(map(is_over, served)))
            assert status(waiting) == "queued"
        wait_for(lambda: is_over(waiting))
        assert worker.test_errors == []
    assert len(waiting.results()) == 1
    assert len(reports(caplog, key)) == 1


@pytest.mark.parametrize("key", [key for key in NEEDED if key != f"rq:queue:{QUEUES[1]}"])
@pytest.mark.parametrize("ending", [done, failed])
def test_a_running_job_ends_once_its_queues_keys_are_what_they_should_be(
    connection: Redis, key: str, ending: Callable[[str], Ending]
) -> None:
    jobs = [enqueue(connection), enqueue(connection, priority="bulk")]
    leases = table(connection)
    claimed = claim(leases, 2)
    with replaced(connection, key):
        endings = [(job, ending(job.id)) for job in claimed]
        assert leases.commit(endings) == [Commit.BROKEN, Commit.DONE]
        assert events(connection, jobs[0].id) == jobs[0].results() == []
        assert leases.jobs() == claimed[:1]
    assert commit(leases, claimed[0], ending(jobs[0].id)) is Commit.DONE
    assert commit(leases, claimed[0], ending(jobs[0].id)) is Commit.DONE
    assert [len(job.results()) for job in jobs] == [1, 1]
    assert connection.keys("rq:execution*") == []


@pytest.mark.parametrize("key", ["rq:finished:{queue}", "rq:results:{job}", "omlx:events:{job}"])
def test_a_job_that_cannot_end_waits_in_its_queue_and_goes_on_from_its_stream(
    redis_url: str, connection: Redis, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, max_completion_tokens=40)
    other = enqueue(connection, priority="high", max_completion_tokens=40)
    key = key.format(queue=QUEUES[1], job=job.id)
    with running_worker(redis_url, step_seconds=0.01) as worker:
        wait_for(lambda: len(events(connection, job.id)) > 3)
        with replaced(connection, key):
            wait_for(lambda: is_over(other))
            wait_for(lambda: status(job) == "queued")
        wait_for(lambda: is_over(job))
        assert worker.test_errors == []
    assert (status(job), status(other)) == ("finished", "finished")
    assert [len(ended.results()) for ended in (job, other)] == [1, 1]
    assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
    assert len(reports(caplog, key)) == 1


@pytest.mark.parametrize(
    "key", ["rq:executions:{}", "rq:results:{}", "omlx:events:{}", "rq:job:{}:dependents"]
)
def test_a_job_with_a_key_of_another_type_waits_and_the_jobs_behind_it_run(
    redis_url: str, connection: Redis, key: str
) -> None:
    job, other = enqueue(connection), enqueue(connection)
    connection.set(key.format(job.id), "of another type")
    run_burst(redis_url)
    assert (status(job), status(other)) == ("queued", "finished")
    assert connection.keys(f"rq:execution:{job.id}:*") == []
    connection.delete(key.format(job.id))
    run_burst(redis_url)
    assert status(job) == "finished"
    assert len(job.results()) == 1


def test_an_append_does_not_fail_for_another_jobs_key(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(2)]
    leases = table(connection)
    claimed = claim(leases, 2)
    key = f"omlx:events:{jobs[0].id}"
    with replaced(connection, key):
        both = [(job, tokens(job.id, 1)) for job in claimed]
        assert leases.append(both) == {}
        assert len(events(connection, jobs[1].id)) == 1
    # The stream is behind, as after a loss of the server: the publisher writes it again.
    assert leases.append([(claimed[0], tokens(jobs[0].id, 2))]) == {jobs[0].id: 0}


def test_a_job_whose_queue_is_of_another_type_keeps_its_lease_until_it_can_return(
    connection: Redis,
) -> None:
    job, other = enqueue(connection), enqueue(connection, priority="bulk")
    leases = table(connection)
    claim(leases, 2)
    with replaced(connection, queue(connection).key):
        kill(connection, leases)
        assert (status(job), status(other)) == ("started", "queued")
    assert sweep(table(connection, "other")) == [job.id]


@pytest.mark.parametrize("key", ["rq:job:{}", "rq:execution:{}:{}", "rq:executions:{}"])
def test_a_key_of_one_job_keeps_no_other_jobs_lease_from_being_renewed(
    connection: Redis, key: str
) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    leases = table(connection)
    claimed = claim(leases, 3)
    expire(connection, leases)
    with replaced(connection, key.format(jobs[1].id, claimed[1].execution)):
        assert leases.renew() == {}
    assert leases.renew([claimed[0], claimed[2]]) == {}
    assert set(sweep(table(connection, "other"))) <= {jobs[1].id}


def test_a_job_that_cannot_be_put_back_is_put_back_once_later(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    dead, alive = table(connection, "dead"), table(connection, "alive")
    (old, *_) = claim(dead, 3)
    expire(connection, dead)
    with replaced(connection, f"rq:executions:{jobs[1].id}"):
        assert sweep(alive) == [jobs[2].id, jobs[0].id]
    assert sweep(alive) == [jobs[1].id]
    assert queue(connection).count == 3
    assert commit(dead, old, done(old.id)) is Commit.LOST


def test_a_claim_waits_for_its_own_key(connection: Redis, caplog: pytest.LogCaptureFixture) -> None:
    job = enqueue(connection)
    leases = table(connection)
    connection.hset("omlx:claim:worker-a", "of another", "type")
    assert leases.claim(1) is None
    assert reports(caplog, "omlx:claim:worker-a")
    connection.delete("omlx:claim:worker-a")
    assert [claimed.id for claimed in claim(leases)] == [job.id]


@pytest.mark.parametrize("key", ["rq:queue:{0}", "rq:deferred:{0}", "rq:job::{1}:dependencies"])
def test_a_job_ends_beside_a_dependent_with_a_key_of_another_type(
    redis_url: str, connection: Redis, key: str
) -> None:
    job = enqueue(connection)
    dependent = enqueue(connection, priority="bulk", depends_on=job)
    key = key.format(QUEUES[2], dependent.id)
    with running_worker(redis_url) as worker:
        with replaced(connection, key):
            wait_for(lambda: is_over(job))
        if "queue" in key:
            wait_for(lambda: is_over(dependent))
            assert len(dependent.results()) == 1
        assert worker.test_errors == []
    assert status(job) == "finished"


def test_a_job_whose_hash_is_replaced_while_it_is_prepared_stops_nobody(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url) as worker:
        prepare = worker.test_engine.prepare

        def prepare_and_replace(request: GenerationRequest, job_id: str) -> list[Row]:
            connection.set(f"rq:job:{job_id}", "of another type")
            return prepare(request, job_id)

        worker.test_engine.prepare = prepare_and_replace
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
