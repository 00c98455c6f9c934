"""Jobs whose workers have died: who runs alone, and who is convicted."""

from __future__ import annotations

import pytest
from redis import Redis
from rq.job import Job

from omlx_producer.cancel import cancel_job
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.quarantine import QUARANTINE_SECONDS
from tests.helpers.leases import claim, commit, done, expire, failed, kill, table
from tests.helpers.workers import enqueue, fetch, queue, status


def crash(connection: Redis, times: int, *jobs: Job) -> None:
    """Let a worker that holds these jobs, and no others, die so often."""
    for _ in range(times):
        leases = table(connection, "victim")
        assert {job.id for job in claim(leases, len(jobs))} == {job.id for job in jobs}
        kill(connection, leases)


def ids(claimed: list[Claim]) -> list[str]:
    return [job.id for job in claimed]


def suspects(connection: Redis, count: int = 1, priority: str = "default") -> list[Job]:
    jobs = [enqueue(connection, priority=priority) for _ in range(count)]
    crash(connection, 2, *jobs)
    return jobs


def outlive_probation(job: Claim, times: float = 1) -> None:
    job.claimed_at -= times * QUARANTINE_SECONDS + 1


# Who runs alone


def test_after_one_death_jobs_run_in_company_as_before(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    crash(connection, 1, *jobs)
    assert ids(claim(table(connection), 10)) == [job.id for job in jobs]


def test_after_two_deaths_a_job_runs_alone(connection: Redis) -> None:
    first, second = suspects(connection, 2)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    assert (suspect.id, suspect.treatment, suspect.crashes) == (first.id, "alone", 2)
    assert claim(leases, 10) == []
    commit(leases, suspect, done(first.id))
    (suspect,) = claim(leases, 10)
    assert suspect.id == second.id
    commit(leases, suspect, done(second.id))
    assert ids(claim(leases, 10)) == [other.id]


def test_a_suspect_that_outlives_its_probation_gets_company(connection: Redis) -> None:
    suspects(connection)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    outlive_probation(suspect)
    assert ids(claim(leases, 10)) == [other.id]


def test_a_busy_worker_takes_no_more_until_the_suspect_has_had_its_turn(
    connection: Redis,
) -> None:
    leases = table(connection)
    running = enqueue(connection)
    (busy,) = claim(leases, 10)
    (waiting,) = suspects(connection)
    enqueue(connection)
    enqueue(connection, priority="high")
    higher = claim(leases, 1)
    assert len(higher) == 1
    assert claim(leases, 10) == []
    enqueue(connection, priority="high")
    assert claim(leases, 10) == []
    for job in (busy, *higher):
        commit(leases, job, done(job.id))
    assert ids(claim(leases, 10)) == [waiting.id]
    assert status(running) == "finished"


def test_other_workers_pass_a_reserved_suspect_over_and_go_on(connection: Redis) -> None:
    first, second = table(connection, "first"), table(connection, "second")
    for leases in (first, second):
        enqueue(connection)
        claim(leases)
    (suspect,) = suspects(connection)
    others = [enqueue(connection) for _ in range(3)]
    assert claim(first, 10) == []
    assert ids(claim(second, 2)) == [job.id for job in others[:2]]
    waiting = connection.lrange(queue(connection).key, 0, -1)
    assert [job.decode() for job in waiting] == [suspect.id, others[2].id]


def test_an_idle_worker_takes_a_suspect_that_a_busy_one_has_reserved(connection: Redis) -> None:
    busy, idle = table(connection, "busy"), table(connection, "idle")
    enqueue(connection)
    claim(busy)
    (suspect,) = suspects(connection)
    other = enqueue(connection)
    assert claim(busy, 10) == []
    assert ids(claim(idle, 10)) == [suspect.id]
    assert ids(claim(busy, 10)) == [other.id]


def test_the_reservation_of_a_worker_that_died_ends_by_itself(connection: Redis) -> None:
    leases = [table(connection, name, seconds=1) for name in ("dead", "alive")]
    for own in leases:
        enqueue(connection)
        claim(own)
    (suspect,) = suspects(connection)
    assert claim(leases[0], 10) == []
    key = f"omlx:suspect:{suspect.id}"
    assert 0 < connection.ttl(key) <= 1
    connection.delete(key)
    assert claim(leases[1], 10) == []
    assert connection.get(key) == b"alive"


def test_a_suspect_that_is_cancelled_while_it_waits_frees_the_worker(connection: Redis) -> None:
    leases = table(connection)
    enqueue(connection)
    claim(leases)
    (suspect,) = suspects(connection)
    other = enqueue(connection)
    assert claim(leases, 10) == []
    cancel_job(connection, suspect.id, keep_for=60)
    assert ids(claim(leases, 10)) == [other.id]
    assert connection.keys("omlx:suspect:*") == []


# Who is convicted


@pytest.mark.parametrize("company", [1, 3, 8])
def test_a_job_is_convicted_by_its_third_death_alone_whatever_came_before(
    connection: Redis, company: int
) -> None:
    jobs = suspects(connection, company)
    job = jobs[0]
    for other in jobs[1:]:
        fetch(connection, other.id).cancel()
    for _ in range(2):
        crash(connection, 1, job)
        leases = table(connection)
        (suspect,) = claim(leases)
        assert suspect.treatment == "alone"
        leases.give_back([suspect])
    crash(connection, 1, job)
    (convict,) = claim(table(connection))
    assert (convict.treatment, convict.crashes) == ("fail", 5)


def test_convicts_are_claimed_in_company_for_they_do_not_run(connection: Redis) -> None:
    (job,) = suspects(connection)
    crash(connection, 3, job)
    other = enqueue(connection)
    assert ids(claim(table(connection), 10)) == [job.id, other.id]


def test_a_death_in_company_convicts_nobody_but_lengthens_the_next_probation(
    connection: Redis,
) -> None:
    (job,) = suspects(connection)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    outlive_probation(suspect)
    claim(leases, 10)
    kill(connection, leases)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    assert (suspect.id, suspect.treatment, suspect.crashes) == (job.id, "alone", 3)
    outlive_probation(suspect)
    assert claim(leases, 10) == []
    outlive_probation(suspect)
    assert ids(claim(leases, 10)) == [other.id]


def test_jobs_given_back_have_no_death_counted(connection: Redis) -> None:
    (job,) = suspects(connection)
    for _ in range(5):
        leases = table(connection)
        (suspect,) = claim(leases)
        leases.give_back([suspect])
    assert (suspect.treatment, suspect.crashes) == ("alone", 2)
    assert connection.hget(job.key, "omlx_alone") is None


def test_an_ending_forgets_the_deaths_before_it(connection: Redis) -> None:
    (job,) = suspects(connection)
    leases = table(connection)
    (suspect,) = claim(leases)
    commit(leases, suspect, failed(job.id))
    fields = ("omlx_crashes", "omlx_lone", "omlx_alone")
    assert connection.hmget(job.key, *fields) == [None] * 3
    job.refresh()
    job.requeue()
    (again,) = claim(leases)
    assert (again.treatment, again.crashes) == ("run", 0)


def test_a_worker_that_was_cut_off_does_not_take_its_own_jobs_for_abandoned(
    connection: Redis,
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    claim(leases)
    expire(connection, leases)
    assert leases.sweep() == []
    assert status(job) == "started"
    assert connection.hget(job.key, "omlx_crashes") is None


@pytest.mark.parametrize("count", ["soon", "-3", "1e300", "nan", "9" * 30])
def test_a_count_that_makes_no_sense_stops_neither_claims_nor_sweeps(
    connection: Redis, count: str
) -> None:
    job = enqueue(connection)
    connection.hset(job.key, "omlx_crashes", count)
    leases = table(connection)
    claim(leases, 10)
    kill(connection, leases)
    assert int(connection.hget(job.key, "omlx_crashes")) in (-2, 1)
    assert ids(claim(table(connection), 10)) == [job.id]
