"""Whoever hangs on the jobs of a worker hears of each of them in order, and of its end once."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import pytest
from redis import Redis
from rq import Retry

from omlx_producer.client.cancel import cancel_job
from omlx_producer.wire import End
from omlx_worker.delivery.observers import JobObserver, Observers
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.messages import Drop, GivenBack, Lost
from omlx_worker.queue.claim import Claim
from tests.helpers.fake_engine import BREAKS_PREPARE, BREAKS_STEP
from tests.helpers.leases import claim, table
from tests.helpers.traffic import Traffic
from tests.helpers.workers import enqueue, fetch, is_over, running_worker, started, wait_for


class Notes(JobObserver):
    """What was told of each claim. Steps in a row count as one."""

    def __init__(self) -> None:
        self._told: dict[Claim, list[str]] = defaultdict(list)
        self.tokens: dict[str, int] = defaultdict(int)

    @property
    def told(self) -> dict[str, list[str]]:
        """By job, its first claim first."""
        told: dict[str, list[str]] = defaultdict(list)
        for each in sorted(self._told, key=lambda claim: claim.execution):
            told[each.id] += self._told[each]
        return told

    def claimed(self, claim: Claim) -> None:
        self._told[claim].append("claimed")

    def started(self, job: ActiveJob) -> None:
        self._told[job.claim].append("started")

    def first_token(self, job: ActiveJob, at: float) -> None:
        self._told[job.claim].append("first token")

    def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
        for job, emission in emissions:
            self.tokens[job.id] += len(emission.tokens)
            if self._told[job.claim][-1] != "stepped":
                self._told[job.claim].append("stepped")

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:
        self._told[claim].append(outcome)


RUN = ["claimed", "started", "first token", "stepped"]


@pytest.mark.slow
def test_every_way_of_a_job_is_told_in_order_and_its_end_once(
    redis_url: str, connection: Redis
) -> None:
    long, notes = {"max_completion_tokens": 9_000}, Notes()
    options = {"step_seconds": 0.002, "drain_timeout": 0.0, "lease_seconds": 4.0}
    with running_worker(redis_url, **options) as worker:
        worker.observers.add(notes)
        done = enqueue(connection, n=2)
        invalid = enqueue(connection, prompt={"text": "x"})
        retried = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=1))
        ends = (done, invalid, retried)
        wait_for(lambda: all(map(is_over, ends)))
        breaks = enqueue(connection, BREAKS_STEP)
        wait_for(lambda: is_over(breaks))
        cancelled, lost, stays = (enqueue(connection, **long) for _ in range(3))
        wait_for(lambda: all(notes.tokens[job.id] for job in (cancelled, lost, stays)))
        cancel_job(connection, cancelled.id, keep_for=60)
        connection.delete(lost.key)
        wait_for(lambda: is_over(cancelled) and notes.told[lost.id][-1] == "lost")
        worker.stop()
        worker.test_thread.join(20)
    assert notes.told == {
        done.id: [*RUN, "finished"],
        invalid.id: ["claimed", "refused"],
        retried.id: ["claimed", "retried", "claimed", "failed"],
        breaks.id: ["claimed", "started", "failed"],
        cancelled.id: [*RUN, "cancelled"],
        lost.id: [*RUN, "lost"],
        stays.id: [*RUN, "given back"],
    }
    usage = fetch(connection, done.id).return_value()["usage"]
    assert notes.tokens[done.id] == usage["completion_tokens"]


@pytest.mark.parametrize(
    ("reasons", "end"),
    [
        ((Lost(), Lost()), "lost"),
        ((End("failed", "x"), End("failed", "x")), "failed"),
        ((GivenBack(), Lost()), "given back"),
    ],
)
def test_the_first_of_two_ends_is_told(
    connection: Redis, reasons: tuple[Lost | End | GivenBack, ...], end: str
) -> None:
    job, notes, leases = enqueue(connection), Notes(), table(connection)
    with Traffic(leases, claim(leases)) as traffic:
        traffic.observers.add(notes)
        for reason in reasons:
            traffic.mailbox.put(Drop(traffic.jobs[0].claim, reason))
    assert notes.told[job.id] == [end]


def test_a_job_that_its_worker_has_claimed_again_ends_although_it_never_started(
    connection: Redis,
) -> None:
    """The lease of the first claim has run out; the table holds the second one."""
    job, notes, leases = enqueue(connection), Notes(), table(connection)
    [first] = claim(leases)
    leases.forget(first)
    with Traffic(leases, []) as traffic:
        traffic.observers.add(notes)
        traffic.mailbox.put(Drop(first, End("failed", "too late")))
    assert notes.told[job.id] == ["lost"]


def test_the_jobs_of_a_broken_worker_are_abandoned(redis_url: str, connection: Redis) -> None:
    notes = Notes()
    with running_worker(redis_url, step_seconds=0.002) as worker:
        worker.observers.add(notes)
        job = enqueue(connection, max_completion_tokens=9_000)
        wait_for(lambda: notes.tokens[job.id])
        worker._error = RuntimeError("broken")
        wait_for(lambda: not worker.test_thread.is_alive())
    assert notes.told[job.id] == [*RUN, "abandoned"]
    assert started(connection) == 1, "its lease expires"


def test_an_observer_that_fails_does_not_hurt_the_job_and_is_named_once(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Notes):
        def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
            raise RuntimeError("no such figure")

        ended = started = stepped  # type: ignore[assignment]

    notes = Notes()
    with caplog.at_level(logging.ERROR), running_worker(redis_url) as worker:
        worker.observers.add(Broken())
        worker.observers.add(notes)
        jobs = [enqueue(connection) for _ in range(3)]
        wait_for(lambda: all(notes.told[job.id][-1:] == ["finished"] for job in jobs))
    assert {fetch(connection, job.id).get_status().value for job in jobs} == {"finished"}
    [line] = [r.message for r in caplog.records if r.name.endswith("observers")]
    assert line.startswith("Broken failed and is told on: ")


def test_an_observer_without_methods_hears_all_and_does_nothing() -> None:
    job = Claim("j", "omlx-1", "omlx:qwen:default", 100.0, 0, b"", None, False)
    observers = Observers(JobObserver())
    observers.claimed(job)
    observers.stepped([], 0.0)
    observers.ended(job)
    assert job.ended
