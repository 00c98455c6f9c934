"""What the traffic thread writes about jobs that it finds it no longer holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from redis import Redis
from rq.job import Job

from omlx_producer import Producer
from omlx_producer.wire import EndEvent, events_key, parse_event, tokens_channel
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.leases import claim, roll_back, sweep, table, tokens
from tests.helpers.redis_server import values_up_to_1_mib
from tests.helpers.server_time import forward
from tests.helpers.traffic import Traffic
from tests.helpers.workers import enqueue, events, queue, run_burst, status, streamed_text

pytestmark = pytest.mark.usefixtures("server_time")


def told(connection: Redis, job: Job) -> list[tuple[str, int]]:
    return [(event.type, event.n) for event in events(connection, job.id)]


def test_the_stream_of_a_job_cancelled_by_rq_is_ended(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases)) as traffic:
        traffic.step()
        job.cancel()
        traffic.step()
    assert told(connection, job) == [("tokens", 1), ("cancelled", 1)]
    assert len(leases) == 0


def test_a_worker_that_slept_longer_than_its_lease_notices_with_its_first_step(
    connection: Redis,
) -> None:
    """Though the job publishes nothing then, and the next renewal is hours away."""
    job = enqueue(connection, priority="bulk")
    leases = table(connection, seconds=86_400)
    with Traffic(leases, claim(leases), streams=False) as traffic:
        traffic.step()
        forward(connection, 86_401)
        assert sweep(table(connection, "sweeper")) == [job.id]
        traffic.step()
        assert len(leases) == 0
    assert status(job) == "queued"
    assert events(connection, job.id) == []


def test_tokens_that_redis_has_lost_are_written_again_as_they_were(connection: Redis) -> None:
    job, other = enqueue(connection, n=2), enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases, 2)) as traffic:
        for _ in range(4):
            traffic.step()
        written = connection.xrange(events_key(job.id))
        roll_back(connection, events_key(job.id), 1)
        traffic.step()
    assert connection.xrange(events_key(job.id))[:4] == written
    assert told(connection, job) == told(connection, other) == [("tokens", n) for n in range(1, 6)]


def test_result_and_last_event_say_what_of_the_prompt_was_not_read(connection: Redis) -> None:
    job = enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases)) as traffic:
        traffic.jobs[0].rows[0].cached = 4
        traffic.step("length")
    with Producer(connection) as producer:
        usage = producer.result(job.id).usage
        *_, last = producer.stream(job.id)
    assert isinstance(last, EndEvent)
    assert last.usage == usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (5, 4)


@pytest.mark.parametrize("left", [0, 1, 3])
def test_tokens_that_redis_has_lost_just_before_the_end_are_written_again(
    connection: Redis, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    append = leases.append
    with Traffic(leases, claim(leases)) as traffic:
        for _ in range(3):
            traffic.step()

        def append_in_vain(*args: Any) -> Any:
            monkeypatch.undo()
            refused = append(*args)
            roll_back(connection, events_key(job.id), left)
            return refused

        monkeypatch.setattr(leases, "append", append_in_vain)
        traffic.step("length")
    assert told(connection, job) == [*(("tokens", n) for n in range(1, 5)), ("done", 4)]
    assert status(job) == "finished"


def test_a_job_whose_stream_ends_inside_an_event_fails(connection: Redis) -> None:
    """Nobody but this worker writes it, so it is not this run's."""
    job = enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases)) as traffic:
        traffic.step()
        traffic.step(tokens=3)
        roll_back(connection, events_key(job.id), 1)
        foreign = tokens(job.id, 2)
        connection.xadd(events_key(job.id), {"event": foreign.model_dump_json()}, id="2-0")
        traffic.step()
    assert status(job) == "failed"
    assert "holds other tokens" in events(connection, job.id)[-1].error


def test_tokens_that_redis_has_lost_are_there_when_a_job_ends(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = enqueue(connection, max_completion_tokens=9)
    lost: list[str] = []

    def lose(leases: LeaseTable, endings: Sequence[tuple[Claim, Ending]]) -> list[Commit]:
        if job.id in [claimed.id for claimed, _ in endings] and not lost:
            roll_back(connection, events_key(job.id), 1)
            lost.append(job.id)
        return commit(leases, endings)

    commit = LeaseTable.commit
    monkeypatch.setattr(LeaseTable, "commit", lose)
    run_burst(redis_url)
    assert lost == [job.id]
    assert streamed_text(connection, job.id) == job.return_value()["choices"][0]["text"]


@pytest.mark.parametrize("streams", [True, False])
def test_what_is_too_long_for_redis_fails_its_job_and_no_other(
    connection: Redis, streams: bool
) -> None:
    """Redis closes the connection, as in an outage."""
    long, other = enqueue(connection), enqueue(connection)
    leases = table(connection)
    with (
        values_up_to_1_mib(connection),
        Traffic(leases, claim(leases, 2), streams=streams) as traffic,
    ):
        traffic.step("length", texts=["x" * 2**20])
        assert len(leases) == 0
        assert traffic.publisher.outage.failures == 0
    assert [status(job) for job in (long, other)] == ["failed", "finished"]
    assert re.match(
        r"request: Redis does not take what its job writes \(\d{7} bytes in one call: .+\); "
        "ask for fewer tokens, choices or log-probabilities$",
        events(connection, long.id)[-1].error,
    )


def test_a_result_longer_than_any_may_be_fails_its_job(
    connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.delivery.response.MAX_RESULT_BYTES", 2**10)
    long, other = enqueue(connection), enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases, 2)) as traffic:
        traffic.step("length", texts=["x" * 2**10])
    assert [status(job) for job in (long, other)] == ["failed", "finished"]
    assert "request: its answers come to" in events(connection, long.id)[-1].error


@pytest.mark.parametrize("first", [0, 2])
def test_a_job_cancelled_while_its_worker_was_away_has_one_end(
    connection: Redis, first: int
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    with (
        Traffic(leases, claim(leases)) as traffic,
        connection.pubsub(ignore_subscribe_messages=True) as channel,
    ):
        for _ in range(first):
            traffic.step()
        forward(connection, 31)
        assert sweep(table(connection, "sweeper")) == [job.id]
        channel.subscribe(tokens_channel(job.id))
        channel.get_message(timeout=1)
        assert Producer(connection).cancel(job.id) == "cancelled"
        traffic.step()
        assert parse_event(channel.get_message(timeout=2)["data"]).type == "cancelled"
        assert channel.get_message(timeout=0.1) is None
    assert told(connection, job) == [
        *(("tokens", n + 1) for n in range(first)),
        ("cancelled", first),
    ]
    assert len(leases) == 0


def test_two_workers_that_lose_a_job_to_rqs_cancel_end_it_once(connection: Redis) -> None:
    job = enqueue(connection)
    stale, fresh = table(connection, "stale"), table(connection, "fresh")
    with Traffic(stale, claim(stale)) as away:
        away.step()
        forward(connection, 31)
        assert sweep(fresh) == [job.id]
        with Traffic(fresh, claim(fresh)) as here:
            job.refresh()
            job.cancel()
            here.step()
        away.step()
        away.step()
    assert told(connection, job) == [("tokens", 1), ("cancelled", 1)]


def test_a_job_that_was_put_back_after_its_cancel_is_not_ended_by_the_worker_that_was_away(
    connection: Redis,
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    (claimed,) = claim(leases)
    job.refresh()
    job.cancel()
    queue(connection).enqueue_job(job)
    leases.lose(claimed)
    assert told(connection, job) == []
