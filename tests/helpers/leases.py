"""Leases for tests, without a worker around them."""

from __future__ import annotations

from redis import Redis

from omlx_producer.wire import (
    PRIORITIES,
    ChoiceDelta,
    End,
    EndEvent,
    TokensEvent,
    Usage,
    queue_name,
    token_digest,
)
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from tests.helpers.server_time import forward
from tests.helpers.workers import ALIAS

QUEUES = [queue_name(ALIAS, priority) for priority in PRIORITIES]


def table(connection: Redis, name: str = "worker-a", seconds: float = 30.0) -> LeaseTable:
    return LeaseTable(connection, name, QUEUES, seconds=seconds)


def claim(leases: LeaseTable, limit: int = 1) -> list[Claim]:
    claimed = leases.claim(limit)
    assert claimed is not None
    return claimed


def commit(leases: LeaseTable, job: Claim, ending: Ending) -> Commit:
    [verdict] = leases.commit([(job, ending)])
    return verdict


def tokens(job_id: str, n: int, count: int = 1) -> TokensEvent:
    delta = ChoiceDelta(
        index=0,
        text="x" * count,
        tokens=[1] * count,
        start=n - count,
        offset=n - count,
        digest=token_digest([1] * n),
    )
    return TokensEvent(job_id=job_id, n=n, choices=[delta])


def done(job_id: str, n: int = 3) -> Ending:
    usage = Usage(prompt_tokens=1, completion_tokens=n, total_tokens=1 + n)
    event = EndEvent.of(job_id, n, End(), finish_reasons=["stop"], usage=usage)
    return Ending(event, result={"text": "abc"})


def failed(job_id: str, sentence: str = "it broke") -> Ending:
    return Ending(EndEvent.of(job_id, 0, End("failed", sentence)))


def stopped(job_id: str) -> Ending:
    return Ending(EndEvent.of(job_id, 0, End("cancelled", "stopped")))


def kill(connection: Redis) -> None:
    """All workers die; when their leases are over, another one sweeps up after them."""
    forward(connection, 31)
    sweep(table(connection, "sweeper"))


def sweep(leases: LeaseTable) -> list[str]:
    """Sweep, whoever leads; returns the ids of the jobs that are back in their queues."""
    return [job_id for ids in Upkeep(leases).sweep() for job_id in ids]


def roll_back(connection: Redis, stream: str, entries: int) -> None:
    """Leave only so many entries of a stream, as a server does that lost what it had not synced."""
    kept = connection.xrange(stream)[:entries]
    with connection.pipeline(transaction=True) as pipeline:
        pipeline.delete(stream)
        for entry_id, fields in kept:
            pipeline.xadd(stream, fields, id=entry_id)
        pipeline.execute()
