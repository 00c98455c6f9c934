"""Jobs whose workers have died: who runs alone, and who is convicted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import Redis
from rq.job import Job

from omlx_producer.client.cancel import cancel_job
from omlx_producer.wire import events_key
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Commit
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.quarantine import QUARANTINE_SECONDS
from tests.helpers.leases import claim, commit, done, failed, kill, sweep, table, tokens
from tests.helpers.server_time import forward
from tests.helpers.workers import enqueue, fetch, status

pytestmark = pytest.mark.usefixtures("server_time")


def die(connection: Redis, times: int, *jobs: Job) -> None:
    """Let a worker that holds these jobs, and no others, die so often."""
    for _ in range(times):
        # The leases of others last.
        forward(connection, -31)
        leases = table(connection, "victim")
        assert {job.id for job in claim(leases, len(jobs))} == {job.id for job in jobs}
        kill(connection)


def ids(claimed: list[Claim]) -> list[str]:
    return [job.id for job in claimed]


def suspects(connection: Redis, count: int = 1, priority: str = "default") -> list[Job]:
    jobs = [enqueue(connection, priority=priority) for _ in range(count)]
    die(connection, 2, *jobs)
    return jobs


def produce(leases: LeaseTable, *jobs: Claim, n: int = 1) -> None:
    """Publish tokens of jobs, n in all of each."""
    events = [(job, tokens(job.id, n, count=n - job.streamed)) for job in jobs]
    assert leases.append(events) == {}


def leave_quarantine(job: Claim) -> None:
    assert job.produced_at is not None
    job.produced_at -= QUARANTINE_SECONDS + 1


# Who is a suspect


def test_after_one_death_jobs_run_in_company_as_before(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(3)]
    die(connection, 1, *jobs)
    assert ids(claim(table(connection), 10)) == [job.id for job in jobs]


def test_after_two_deaths_a_job_runs_alone(connection: Redis) -> None:
    first, second = suspects(connection, 2)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    assert (suspect.id, suspect.treatment, suspect.deaths) == (first.id, "alone", 2)
    assert claim(leases, 10) == []
    commit(leases, suspect, done(first.id))
    (suspect,) = claim(leases, 10)
    assert suspect.id == second.id
    commit(leases, suspect, done(second.id))
    assert ids(claim(leases, 10)) == [other.id]


def test_two_kills_of_a_worker_with_64_jobs_that_go_on_make_none_run_alone(
    connection: Redis,
) -> None:
    jobs = [enqueue(connection) for _ in range(64)]
    for kills in range(2):
        leases = table(connection, "victim")
        produce(leases, *claim(leases, 64), n=kills + 1)
        kill(connection)
    again = claim(table(connection), 64)
    assert ids(again) == [job.id for job in jobs]
    assert {(job.treatment, job.deaths, job.streamed) for job in again} == {("run", 0, 2)}


def test_tokens_of_an_earlier_claim_acquit_no_job(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    produce(leases, *claim(leases), n=3)
    kill(connection)
    die(connection, 2, job)
    (suspect,) = claim(table(connection))
    assert (suspect.treatment, suspect.deaths, suspect.streamed) == ("alone", 2, 3)


def test_a_job_whose_stream_expired_is_acquitted_by_its_new_tokens(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (first,) = claim(leases)
    produce(leases, first, n=3)
    leases.give_back([first])
    connection.delete(events_key(job.id))
    (again,) = claim(leases)
    assert again.streamed == 0
    produce(leases, again)
    kill(connection)
    assert connection.hget(job.key, "omlx_deaths") is None


# How it comes to be alone, and how long it is


def test_a_suspect_that_has_produced_tokens_for_a_while_gets_company(connection: Redis) -> None:
    suspects(connection)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    suspect.claimed_at -= 1000
    assert claim(leases, 10) == [], "it has produced nothing"
    produce(leases, suspect)
    assert claim(leases, 10) == []
    leave_quarantine(suspect)
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
    higher = claim(leases, 10)
    assert len(higher) == 1
    enqueue(connection, priority="high")
    assert claim(leases, 10) == []
    for job in (busy, *higher):
        commit(leases, job, done(job.id))
    assert ids(claim(leases, 10)) == [waiting.id]
    assert status(running) == "finished"


def test_a_full_worker_pauses_no_job_for_others_while_a_suspect_waits(connection: Redis) -> None:
    leases = table(connection)
    enqueue(connection)
    claim(leases)
    suspects(connection)
    assert claim(leases) == []
    high = enqueue(connection, priority="high")
    assert leases.claim(1, ["omlx:fake:high"]) == []
    assert status(high) == "queued"


def test_a_busy_worker_goes_on_once_another_has_taken_the_suspect(connection: Redis) -> None:
    busy, idle = table(connection, "busy"), table(connection, "idle")
    enqueue(connection)
    claim(busy)
    (suspect,) = suspects(connection)
    other = enqueue(connection)
    assert claim(busy, 10) == []
    assert ids(claim(idle, 10)) == [suspect.id]
    assert ids(claim(busy, 10)) == [other.id]


def test_a_suspect_that_is_cancelled_while_it_waits_frees_the_worker(connection: Redis) -> None:
    leases = table(connection)
    enqueue(connection)
    claim(leases)
    (suspect,) = suspects(connection)
    other = enqueue(connection)
    assert claim(leases, 10) == []
    cancel_job(connection, suspect.id, keep_for=60)
    assert ids(claim(leases, 10)) == [other.id]


# Who is convicted


@pytest.mark.parametrize("company", [1, 3, 8])
def test_a_job_is_convicted_by_its_third_death_alone(connection: Redis, company: int) -> None:
    jobs = suspects(connection, company)
    job = jobs[0]
    for other in jobs[1:]:
        fetch(connection, other.id).cancel()
    for _ in range(2):
        die(connection, 1, job)
        leases = table(connection)
        (suspect,) = claim(leases)
        assert suspect.treatment == "alone"
        leases.give_back([suspect])
    die(connection, 1, job)
    (convict,) = claim(table(connection))
    assert (convict.treatment, convict.deaths) == ("fail", 5)


def test_convicts_are_claimed_in_company_for_they_do_not_run(connection: Redis) -> None:
    (job,) = suspects(connection)
    die(connection, 3, job)
    other = enqueue(connection)
    assert ids(claim(table(connection), 10)) == [job.id, other.id]


def test_a_death_after_quarantine_convicts_nobody(connection: Redis) -> None:
    (job,) = suspects(connection)
    other = enqueue(connection)
    leases = table(connection)
    (suspect,) = claim(leases, 10)
    produce(leases, suspect)
    leave_quarantine(suspect)
    assert ids(claim(leases, 10)) == [other.id]
    kill(connection)
    (suspect,) = claim(table(connection), 10)
    assert (suspect.id, suspect.treatment, suspect.deaths) == (job.id, "alone", 2)


def test_jobs_given_back_have_no_death_counted(connection: Redis) -> None:
    suspects(connection)
    for _ in range(5):
        leases = table(connection)
        (suspect,) = claim(leases)
        leases.give_back([suspect])
    assert (suspect.treatment, suspect.deaths) == ("alone", 2)


def test_an_ending_forgets_the_deaths_before_it(connection: Redis) -> None:
    (job,) = suspects(connection)
    leases = table(connection)
    (suspect,) = claim(leases)
    commit(leases, suspect, failed(job.id))
    assert connection.hmget(job.key, "omlx_deaths", "omlx_streamed") == [None] * 2
    job.refresh()
    job.requeue()
    (again,) = claim(leases)
    assert (again.treatment, again.deaths) == ("run", 0)


def test_a_worker_that_was_cut_off_does_not_take_its_own_jobs_for_abandoned(
    connection: Redis,
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    claim(leases)
    forward(connection, 31)
    assert sweep(leases) == []
    assert status(job) == "started"
    assert connection.hget(job.key, "omlx_deaths") is None


def give_back(leases: LeaseTable, job: Claim) -> None:
    assert leases.give_back([job]) == 0


def renew(leases: LeaseTable, job: Claim) -> None:
    assert leases.renew([job]) == {job.id: "queued"}


def append(leases: LeaseTable, job: Claim) -> None:
    assert leases.append([(job, tokens(job.id, 1))]) == {job.id: "queued"}


def end(leases: LeaseTable, job: Claim) -> None:
    assert commit(leases, job, done(job.id)) is Commit.LOST


@pytest.mark.parametrize("refused", [renew, append, end, give_back])
def test_a_worker_that_was_only_away_takes_its_death_back(
    connection: Redis, refused: Callable[[LeaseTable, Claim], None]
) -> None:
    suspects(connection)
    for _ in range(3):
        away = table(connection, "away")
        (claimed,) = claim(away)
        kill(connection)
        for _ in range(2):
            refused(away, claimed)
    (suspect,) = claim(table(connection))
    assert (suspect.treatment, suspect.deaths) == ("alone", 2), "the two deaths still count"


@pytest.mark.parametrize("field", ["omlx_deaths", "omlx_streamed"])
@pytest.mark.parametrize("count", ["soon", "-3", "nan", "", "1.5"])
def test_a_count_that_makes_no_sense_stops_neither_claims_nor_sweeps(
    connection: Redis, field: str, count: str
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    claim(leases, 10)
    connection.hset(job.key, field, count)
    kill(connection)
    assert ids(claim(table(connection), 10)) == [job.id]
