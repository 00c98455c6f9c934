"""Leases against a real server: who may take, write, end and give back a job, and who may not."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import TimeoutError
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import JobStatus
from rq.registry import StartedJobRegistry
from rq.suspension import resume, suspend

from tests.helpers.leases import QUEUES, claim, commit, done, failed, sweep, table, tokens
from tests.helpers.server_time import forward
from tests.helpers.workers import enqueue, events, fetch, queue, status

pytestmark = pytest.mark.usefixtures("server_time")


def test_jobs_are_taken_by_priority_then_by_age(connection: Redis) -> None:
    order = ["bulk", "default", "high", "bulk", "default", "high"]
    jobs = [enqueue(connection, priority=priority) for priority in order]
    claimed = claim(table(connection), 5)
    assert [job.id for job in claimed] == [jobs[i].id for i in (2, 5, 1, 4, 0)]
    assert [job.queue for job in claimed[::2]] == QUEUES
    assert status(jobs[3]) == "queued"


def test_no_two_claimers_ever_get_the_same_job(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection, result_ttl=60) for _ in range(200)]
    taken: list[str] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        with Redis.from_url(redis_url) as own:
            leases = table(own, f"worker-{number}")
            while got := claim(leases, 7):
                with lock:
                    taken.extend(job.id for job in got)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(taken) == sorted(job.id for job in jobs)


def test_a_claimed_job_reads_as_started_everywhere_in_rq(connection: Redis) -> None:
    job = enqueue(connection)
    (claimed,) = claim(table(connection))
    job.refresh()
    assert job.get_status() is JobStatus.STARTED
    assert job.worker_name == "worker-a"
    assert abs(job.started_at - datetime.now(UTC)) < timedelta(seconds=5)
    assert job.last_heartbeat == job.started_at
    (execution,) = job.get_executions()
    assert execution.id == claimed.execution
    assert abs(execution.created_at - job.started_at) < timedelta(milliseconds=2)
    assert execution.worker_name == "worker-a"
    registry = StartedJobRegistry(claimed.queue, connection=connection)
    assert registry.get_job_and_execution_ids() == [(job.id, claimed.execution)]
    assert queue(connection).count == 0


@pytest.mark.parametrize("day", ["1970-01-01", "2024-02-29", "2025-12-31", "2026-03-01"])
def test_dates_are_written_as_rq_writes_them(connection: Redis, day: str) -> None:
    from omlx_producer.lua import source

    seconds = int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) + 86_399
    prelude = (
        source("claim")
        .partition("-- Take up to")[0]
        .replace("redis.call('TIME')", f"{{'{seconds}', '42'}}")
    )
    date = connection.eval(prelude + "\nlocal _, date = now()\nreturn date", 0)
    assert date.decode() == f"{day}T23:59:59.000042Z"


def test_ids_without_a_job_and_ids_pushed_twice_are_skipped(connection: Redis) -> None:
    ghost, job = enqueue(connection), enqueue(connection)
    connection.delete(ghost.key)
    for odd in (b"a:b", b"\xff", b""):
        connection.hset(f"{RQ}:job:".encode() + odd, mapping={"data": b"x", "status": "queued"})
    connection.rpush(queue(connection).key, job.id, "no-such-job", b"a:b", b"\xff", b"")
    assert [claimed.id for claimed in claim(table(connection), 10)] == [job.id]
    assert queue(connection).count == 0


@pytest.mark.parametrize("end", [done, failed])
def test_the_second_id_of_a_job_that_has_ended_is_dropped(connection: Redis, end: Any) -> None:
    job = enqueue(connection)
    connection.rpush(queue(connection).key, job.id)
    leases = table(connection)
    (claimed,) = claim(leases)
    commit(leases, claimed, end(job.id))
    assert claim(leases) == []
    assert queue(connection).count == 0


def test_a_claim_that_is_made_twice_leaves_no_job_with_nobody(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(5)]
    leases = table(connection)
    once = leases._claim

    def twice(**call: Any) -> Any:
        once(**call)
        return once(**call)

    leases._claim = twice  # type: ignore[assignment]
    # As redis-py does by itself when an answer takes too long.
    claimed = claim(leases, 2)
    assert [job.id for job in claimed] == [job.id for job in jobs[:2]]
    assert connection.zcard(f"{RQ}:wip:{QUEUES[1]}") == 2
    assert leases.renew() == {}
    assert [job.id for job in claim(leases, 3)] == [job.id for job in jobs[2:]]


@pytest.mark.parametrize("suspended", [False, True])
def test_a_claim_that_was_never_answered_is_made_good_by_the_next(
    connection: Redis, suspended: bool
) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    leases, other = table(connection), table(connection, "other")
    once = leases._claim

    def unanswered(**call: Any) -> Any:
        once(**call)
        raise TimeoutError("no answer")

    leases._claim = unanswered  # type: ignore[assignment]
    with pytest.raises(TimeoutError):
        leases.claim(2)
    leases._claim = once
    # Somebody else has got one of them meanwhile.
    connection.zincrby(
        f"{RQ}:wip:{QUEUES[1]}", -31, connection.zrange(f"{RQ}:wip:{QUEUES[1]}", 0, 0)[0]
    )
    sweep(other)
    (theirs,) = claim(other)
    if suspended:
        suspend(connection)
        assert leases.claim(1) is None
        resume(connection)
    assert [job.id for job in claim(leases, 5)] == [job.id for job in jobs if job.id != theirs.id]
    assert other.renew() == {}
    assert connection.zcard(f"{RQ}:wip:{QUEUES[1]}") == 3


def test_a_script_goes_with_the_call_to_a_server_that_forgets_it_again_and_again(
    connection: Redis,
) -> None:
    """Also between the loading of a script and its call, where redis-py's own would fail."""
    leases = table(connection)
    execute = connection.execute_command

    def forgetful(*args: Any, **options: Any) -> Any:
        if str(args[0]).startswith("EVAL"):
            execute("SCRIPT FLUSH")
        return execute(*args, **options)

    connection.execute_command = forgetful  # type: ignore[method-assign]
    enqueue(connection)
    assert len(claim(leases)) == 1
    assert leases.renew() == {}


def test_a_renewal_keeps_all_leases_and_names_the_lost_ones(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    leases = table(connection, seconds=30)
    claimed = claim(leases, 3)
    forward(connection, 31)
    fetch(connection, jobs[1].id).cancel()
    jobs[2].delete()
    assert leases.renew() == {jobs[1].id: "canceled", jobs[2].id: "deleted"}
    assert sweep(table(connection, "other")) == []
    assert leases.holds(claimed[0])
    assert not connection.exists(jobs[2].key)


def test_jobs_given_back_stand_in_front_in_their_old_order(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(5)]
    leases = table(connection)
    assert leases.give_back(claim(leases, 3)) == 3
    waiting = connection.lrange(queue(connection).key, 0, -1)
    assert waiting == [job.id.encode() for job in jobs]
    assert [status(job) for job in jobs] == ["queued"] * 5
    assert len(leases) == 0
    assert connection.zcard(f"{RQ}:wip:{QUEUES[1]}") == 0
    assert connection.keys(f"{RQ}:execution:*") == []
    jobs[0].refresh()
    assert jobs[0].started_at is None


def test_only_the_holder_can_give_a_job_back(connection: Redis) -> None:
    enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    old = claim(stale)
    forward(connection, 31)
    sweep(fresh)
    claim(fresh)
    assert stale.give_back(old) == 0
    assert queue(connection).count == 0


def test_expired_leases_return_to_the_front_once(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(4)]
    dead = table(connection, "dead")
    claim(dead, 2)
    forward(connection, 31)
    sweepers = [table(connection, f"sweeper-{n}") for n in range(3)]
    swept = [sweep(sweeper) for sweeper in sweepers]
    assert swept == [[jobs[1].id, jobs[0].id], [], []]
    waiting = connection.lrange(queue(connection).key, 0, -1)
    assert waiting == [job.id.encode() for job in jobs]


def test_living_leases_are_not_swept(connection: Redis) -> None:
    job = enqueue(connection)
    claim(table(connection))
    assert sweep(table(connection, "other")) == []
    assert status(job) == "started"


def test_looking_at_rqs_registries_does_not_fail_an_abandoned_job(connection: Redis) -> None:
    job = enqueue(connection)
    # RQ goes by the time of this machine.
    forward(connection, -31)
    claim(table(connection))
    forward(connection, 31)
    assert queue(connection).started_job_registry.count == 1
    assert status(job) == "started"
    assert sweep(table(connection, "other")) == [job.id]


def test_a_stock_workers_started_jobs_are_left_to_rq(connection: Redis) -> None:
    job = enqueue(connection)
    connection.lpop(queue(connection).key)
    connection.hset(job.key, "status", "started")
    connection.zadd(f"{RQ}:wip:{QUEUES[1]}", {f"{job.id}:{'a' * 32}": time.time() - 1})
    assert sweep(table(connection)) == []


def test_a_second_run_is_told_what_the_first_left_in_the_stream(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (first,) = claim(leases)
    leases.append([(first, tokens(job.id, 5, 5))])
    leases.give_back([first])
    (second,) = claim(leases)
    assert (first.streamed, second.streamed) == (0, 5)


def test_a_requeued_job_starts_a_new_stream(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (first,) = claim(leases)
    commit(leases, first, failed(job.id))
    job.refresh()
    job.requeue()
    (second,) = claim(leases)
    assert second.streamed == 0
    assert events(connection, job.id) == []


def test_what_cannot_be_decoded_is_carried_as_it_is(connection: Redis) -> None:
    fields: dict[str, Any] = {"data": b"\x80\x04junk", "status": "queued", "timeout": "soon"}
    connection.hset(f"{RQ}:job:odd", mapping=fields)
    connection.rpush(queue(connection).key, "odd")
    (job,) = claim(table(connection))
    assert job.data == b"\x80\x04junk"
    assert job.timeout is None
