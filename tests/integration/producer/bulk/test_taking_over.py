"""Feeders that are slow, asleep or overtaken: one has a batch, and its rows run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import redis

from omlx_producer.bulk import batch_feeder
from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.batch_feeder import BatchFeed, Feeder
from omlx_producer.bulk.feed import Feed
from omlx_producer.bulk.jobs import read_statuses
from omlx_producer.bulk.window import InFlight
from omlx_producer.cli import batch as batch_commands
from tests.helpers.leases import claim, table
from tests.helpers.workers import running_worker, wait_for
from tests.integration.producer.bulk.conftest import Run
from tests.integration.producer.bulk.test_batch import batch_of
from tests.integration.producer.bulk.test_feed import QUEUE, RUN, Kept, rows

Looks = list[Callable[[], object]]
LOOK_MS = 4_000


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What happens at each look at a chunk of rows, in order; nothing once the list is empty."""
    happens: Looks = []

    def look(connection: redis.Redis, job_ids: Sequence[str]) -> list[str | None]:
        if happens:
            happens.pop(0)()
        return read_statuses(connection, job_ids)

    monkeypatch.setattr(batch_feeder, "read_statuses", look)
    return happens


def cancelling(connection: redis.Redis, count: int) -> Batch:
    batch = batch_of(connection, count)
    batch.ask_to_cancel()
    return batch


def test_a_large_batch_is_looked_through_under_its_lock(
    connection: redis.Redis, looks: Looks
) -> None:
    batch = cancelling(connection, 1000)

    def take_long() -> None:
        left = connection.pttl(batch.lock_key) - LOOK_MS
        assert left > 0, "the lock ran out"
        connection.pexpire(batch.lock_key, left)

    looks += 5 * [take_long]
    feed = BatchFeed.begin(batch)
    assert looks == []
    assert feed is not None
    assert not feed.turn(0.01)
    assert batch.read().state == "cancelled"


class Clock:
    """The clock of `omlx_producer.cli.batch`, which can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def forward(self) -> None:
        self.ahead += 60


def test_running_rows_are_stopped_however_long_it_takes_to_look_through_a_batch(
    redis_url: str,
    connection: redis.Redis,
    looks: Looks,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(batch_commands, "time", clock)
    batch = Batch.create(connection)
    batch.upload(rows(2, max_completion_tokens=9_000))
    with running_worker(redis_url, step_seconds=0.01):
        feed = BatchFeed.begin(batch)
        assert feed is not None
        feed.turn(0.01)
        wait_for(lambda: connection.zcard(f"rq:wip:{QUEUE}") == 2)
        # The feeder dies, and nobody else feeds.
        connection.delete(batch.lock_key)
        looks.append(clock.forward)
        assert run("cancel", batch.id).output == "cancelled\n"
    assert batch.read().failures == {"cancelled": 2}


def test_cancelling_waits_for_a_feeder_that_takes_over_meanwhile(
    connection: redis.Redis, looks: Looks, run: Run
) -> None:
    batch = batch_of(connection, 250)
    looks.append(lambda: connection.set(batch.lock_key, "another", px=300))
    cancelled = run("cancel", batch.id)
    assert (cancelled.exit_code, cancelled.output) == (0, "cancelled\n")


def test_a_feeder_overtaken_while_it_begins_goes_on_with_other_batches(
    connection: redis.Redis, looks: Looks
) -> None:
    lost, kept = cancelling(connection, 250), batch_of(connection, 5)
    looks.append(lambda: connection.set(lost.lock_key, "another"))
    feeder = Feeder(connection)
    feeder.turn()
    assert connection.get(lost.lock_key) == b"another"
    assert connection.exists(kept.lock_key)
    assert connection.llen(f"rq:queue:{QUEUE}") == 5
    assert not feeder.idle


def test_a_feeder_that_slept_past_its_lock_enqueues_nothing_that_another_has(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep, awake = (Feed(connection, RUN, rows(3), Kept()) for _ in range(2))
    workers = table(connection, "worker-a"), table(connection, "worker-b")
    enqueue, claimed = asleep._enqueue, []

    def sleep_first(flights: list[InFlight]) -> None:
        awake.turn(0)
        claimed.extend(claim(workers[0], 8))
        enqueue(flights)

    monkeypatch.setattr(asleep, "_enqueue", sleep_first)
    asleep.turn(0)
    assert len(claimed) == 3
    assert claim(workers[1], 8) == []
    assert connection.zcard(f"rq:wip:{QUEUE}") == 3
