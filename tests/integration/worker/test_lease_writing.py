"""Writing under a lease: appends and endings, and who is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import Redis
from redis.exceptions import RedisError
from rq.defaults import RQ_KEY_PREFIX as RQ
from rq.job import JobStatus

from omlx_producer.outage import passes
from omlx_producer.wire import (
    End,
    EndEvent,
    events_key,
    tokens_channel,
)
from omlx_worker.queue.ending import Commit, Ending
from tests.helpers.bulk_rows import batch_of
from tests.helpers.leases import (
    claim,
    commit,
    done,
    failed,
    roll_back,
    sweep,
    table,
    tokens,
)
from tests.helpers.server_time import forward
from tests.helpers.workers import enqueue, events, queue, status

pytestmark = pytest.mark.usefixtures("server_time")


def test_an_append_reaches_stream_and_channel_alike(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    with connection.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(tokens_channel(job.id))
        pubsub.get_message(timeout=1)
        assert leases.append([(claimed, tokens(job.id, 2, 2))]) == {}
        heard = pubsub.get_message(timeout=2)
    ((entry_id, fields),) = connection.xrange(events_key(job.id))
    assert entry_id == b"2-0"
    assert fields[b"event"] == heard["data"]
    assert connection.ttl(events_key(job.id)) > 0


def test_an_append_by_a_worker_that_lost_its_lease_is_refused(connection: Redis) -> None:
    job = enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    (old,) = claim(stale)
    forward(connection, 31)
    assert sweep(fresh) == [job.id]
    (new,) = claim(fresh)
    assert stale.append([(old, tokens(job.id, 1))]) == {job.id: "started"}
    assert events(connection, job.id) == []
    assert fresh.append([(new, tokens(job.id, 1))]) == {}
    assert stale.append([(old, tokens(job.id, 2)), (old, None)]) == {job.id: "started"}
    assert len(events(connection, job.id)) == 1


def test_an_append_that_is_repeated_is_written_once(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    for _ in range(2):
        assert leases.append([(claimed, tokens(job.id, 1))]) == {}
    assert len(events(connection, job.id)) == 1
    assert leases.append([(claimed, tokens(job.id, n)) for n in (1, 2)]) == {}
    assert len(events(connection, job.id)) == 2


def test_an_append_of_other_tokens_is_refused(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    for n in (1, 2):
        leases.append([(claimed, tokens(job.id, n))])
    assert leases.append([(claimed, tokens(job.id, 2, 2))]) == {job.id: "written"}


def test_an_append_to_a_stream_whose_end_was_lost_is_refused(connection: Redis) -> None:
    """A gap that no consumer could fill must not come to be."""
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    for n in (1, 2, 3):
        leases.append([(claimed, tokens(job.id, n))])
    roll_back(connection, events_key(job.id), 1)
    assert leases.append([(claimed, tokens(job.id, 4))]) == {job.id: 1}
    assert leases.append([(claimed, tokens(job.id, 2))]) == {}


def test_a_job_starts_over_with_an_empty_stream_while_the_lease_holds(connection: Redis) -> None:
    job = enqueue(connection)
    first, stale, fresh = (table(connection, name) for name in ("first", "stale", "fresh"))
    (earlier,) = claim(first)
    first.append([(earlier, tokens(job.id, 5, 5))])
    first.give_back([earlier])
    (old,) = claim(stale)
    stale.start_over(old)
    assert events(connection, job.id) == []
    forward(connection, 31)
    assert sweep(fresh) == [job.id]
    (new,) = claim(fresh)
    assert fresh.append([(new, tokens(job.id, 1))]) == {}
    stale.start_over(old)
    assert len(events(connection, job.id)) == 1, "those tokens are another run's"


def test_one_refused_job_does_not_hold_up_the_others(connection: Redis) -> None:
    first, second = enqueue(connection), enqueue(connection)
    leases = table(connection)
    claimed = claim(leases, 2)
    leases.give_back([claimed[0]])
    refused = leases.append([(job, tokens(job.id, 1)) for job in claimed])
    assert refused == {first.id: "queued"}
    assert len(events(connection, second.id)) == 1


# Ending


def test_a_commit_writes_what_rq_reads(connection: Redis) -> None:
    job = enqueue(connection, result_ttl=77)
    leases = table(connection)
    (claimed,) = claim(leases)
    assert commit(leases, claimed, done(job.id)) is Commit.DONE
    assert len(leases) == 0
    job.refresh()
    assert job.return_value() == {"text": "abc"}
    assert job.get_status() is JobStatus.FINISHED
    assert job in queue(connection).finished_job_registry
    assert job.get_executions() == []
    assert connection.zcard(f"{RQ}:wip:{claimed.queue}") == 0
    assert connection.xrange(events_key(job.id))[-1][0] == b"3-1"


def test_a_commit_without_the_lease_is_refused(connection: Redis) -> None:
    job = enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    (old,) = claim(stale)
    forward(connection, 31)
    sweep(fresh)
    assert commit(stale, old, done(job.id)) is Commit.LOST
    assert status(job) == "queued"
    (new,) = claim(fresh)
    assert commit(stale, old, done(job.id)) is Commit.LOST
    assert commit(stale, old, failed(job.id)) is Commit.LOST
    assert job.results() == []
    assert events(connection, job.id) == []
    assert commit(fresh, new, done(job.id)) is Commit.DONE
    assert len(job.results()) == 1


def test_a_commit_is_written_once(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    # The second time as if the first answer had been lost on its way.
    verdicts = [commit(leases, claimed, done(job.id)) for _ in range(2)]
    assert verdicts == [Commit.DONE, Commit.DONE]
    assert len(job.results()) == 1
    assert len(events(connection, job.id)) == 1


def test_a_repeated_commit_of_a_row_is_done_though_its_result_was_taken(connection: Redis) -> None:
    batch = batch_of(connection, 1)
    leases = table(connection)
    (claimed,) = claim(leases)
    assert commit(leases, claimed, done(claimed.id)) is Commit.DONE
    [name] = batch.ended().names
    batch.acknowledge([name])
    assert commit(leases, claimed, done(claimed.id)) is Commit.DONE
    assert commit(leases, claimed, failed(claimed.id)) is Commit.LOST


def test_many_jobs_are_ended_at_once_each_by_itself(connection: Redis) -> None:
    jobs = [enqueue(connection) for _ in range(5)]
    leases = table(connection)
    claimed = claim(leases, 5)
    connection.delete(jobs[2].key)
    verdicts = leases.commit([(job, done(job.id)) for job in claimed])
    assert verdicts == [Commit.DONE, Commit.DONE, Commit.LOST, Commit.DONE, Commit.DONE]
    assert {status(job) for job in (*jobs[:2], *jobs[3:])} == {"finished"}
    assert leases.jobs() == []


@pytest.mark.parametrize(
    ("setting", "value", "well"),
    [("maxmemory", "1mb", "0"), ("min-replicas-to-write", "1", "0")],
)
@pytest.mark.parametrize("ending", [done, failed])
def test_what_redis_cannot_take_now_is_kept_for_later(
    connection: Redis, setting: str, value: str, well: str, ending: Callable[[str], Ending]
) -> None:
    jobs = [enqueue(connection) for _ in range(2)]
    leases = table(connection)
    claimed = claim(leases, 2)
    connection.config_set(setting, value)
    try:
        with pytest.raises(RedisError) as refused:
            leases.commit([(job, ending(job.id)) for job in claimed])
    finally:
        connection.config_set(setting, well)
    assert passes(refused.value)
    assert leases.jobs() == claimed
    verdicts = leases.commit([(job, ending(job.id)) for job in claimed])
    assert verdicts == [Commit.DONE, Commit.DONE]
    assert {status(job) for job in jobs} <= {"finished", "failed"}


def test_a_failure_is_recorded_with_its_sentence(connection: Redis) -> None:
    job = enqueue(connection, failure_ttl=99)
    leases = table(connection)
    (claimed,) = claim(leases)
    assert commit(leases, claimed, failed(job.id, "prompt: empty")) is Commit.DONE
    job.refresh()
    assert job.is_failed
    result = job.latest_result()
    assert result.type is result.Type.FAILED
    assert result.exc_string == "prompt: empty"
    assert job in queue(connection).failed_job_registry
    assert 0 < connection.ttl(job.key) <= 99
    assert job.requeue().get_status() is JobStatus.QUEUED


def test_a_stopped_job_reads_as_rq_leaves_one(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    commit(
        leases,
        claimed,
        Ending(EndEvent.of(job.id, 0, End("cancelled", "stopped on request"))),
    )
    assert job.get_status() is JobStatus.STOPPED
    assert job in queue(connection).failed_job_registry


def test_results_that_never_expire_are_kept(connection: Redis) -> None:
    job = enqueue(connection, result_ttl=-1)
    leases = table(connection)
    (claimed,) = claim(leases)
    leases.append([(claimed, tokens(job.id, 3, 3))])
    commit(leases, claimed, done(job.id))
    for key in (job.key, f"{RQ}:results:{job.id}", events_key(job.id)):
        assert connection.ttl(key) == -1
    assert connection.zscore(f"{RQ}:finished:{claimed.queue}", job.id) == float("inf")
