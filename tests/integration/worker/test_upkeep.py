"""What one worker does for all: it alone, a bounded number of entries a call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
from redis import Redis

from omlx_producer.bulk.batch import Batch
from omlx_producer.wire import wake_channel
from omlx_producer.wire.keys import open_key
from omlx_worker.queue.upkeep import (
    MOST_ENTRIES,
    Upkeep,
)
from tests.helpers.leases import QUEUES, claim, sweep, table
from tests.helpers.server_time import forward
from tests.helpers.workers import ALIAS, enqueue, running_worker, wait_for

pytestmark = pytest.mark.usefixtures("server_time")

QUEUE = QUEUES[1]
WIP = f"rq:wip:{QUEUE}"


class Clock:
    """Seconds that a test moves, and that each look takes."""

    def __init__(self, look: float = 0.0) -> None:
        self.now = 0.0
        self._look = look

    def __call__(self) -> float:
        self.now += self._look
        return self.now


def abandon(connection: Redis, count: int, queue_name: str = QUEUE) -> list[str]:
    """Jobs whose worker claimed them in this order and died."""
    ids = [f"job-{n}" for n in range(count)]
    now = time.time() + 7 * 86_400 - 60
    with connection.pipeline() as pipeline:
        for n, job_id in enumerate(ids):
            execution = f"omlx-{n:032x}"
            fields = {"status": "started", "origin": queue_name, "omlx_execution": execution}
            pipeline.hset(f"rq:job:{job_id}", mapping=fields)
            pipeline.zadd(f"rq:wip:{queue_name}", {f"{job_id}:{execution}": now + n / 1e6})
        pipeline.execute()
    return ids


def waiting(connection: Redis) -> list[str]:
    return [job_id.decode() for job_id in connection.lrange(f"rq:queue:{QUEUE}", 0, -1)]


def sizes(calls: Iterable[list[str]]) -> list[int]:
    return [len(ids) for ids in calls if ids]


# Who does it


def test_one_worker_leads_until_it_leaves_or_is_silent(connection: Redis) -> None:
    first, second, third = (Upkeep(table(connection, name)) for name in "abc")
    assert (first.lead(), second.lead(), first.lead()) == (True, False, True)
    first.leave()
    assert (second.lead(), first.lead()) == (True, False)
    first.leave()
    assert not third.lead()
    connection.delete(*connection.keys("omlx:lead:*"))
    assert third.lead()


def test_a_worker_that_does_not_lead_sweeps_and_moves_nothing(connection: Redis) -> None:
    leader, other = (Upkeep(table(connection, name)) for name in "ab")
    leader.attend()
    abandon(connection, 1)
    other.attend()
    assert waiting(connection) == []
    leader.leave()


def test_the_next_worker_goes_on_when_the_leader_has_died(connection: Redis) -> None:
    clock = Clock()
    Upkeep(table(connection, "dead")).attend()
    ids = abandon(connection, 2)
    other = Upkeep(table(connection, "other"), clock)
    other.attend()
    connection.delete(*connection.keys("omlx:lead:*"))
    clock.now += 30
    other.attend()
    assert waiting(connection) == ids


def test_a_clock_that_goes_back_keeps_no_job_of_a_dead_worker_waiting(
    connection: Redis,
) -> None:
    ids = [enqueue(connection).id for _ in range(4)]
    dead, other = table(connection, "dead"), table(connection, "other")
    claim(dead, 3)
    Upkeep(dead).attend()
    claim(other)
    forward(connection, -3600)
    upkeep = Upkeep(other)
    assert not upkeep.lead()
    [lock] = connection.keys("omlx:lead:*")
    assert connection.pttl(lock) <= 22_500
    connection.delete(lock)
    assert sweep(other) == [], "each lease goes on for what was left of it"
    forward(connection, 31)
    assert sorted(sweep(other)) == sorted(ids[:3])
    assert waiting(connection) == ids[:3]
    assert len(other) == 1


def test_a_leader_that_drains_lets_another_lead_at_once(redis_url: str, connection: Redis) -> None:
    with running_worker(redis_url):
        wait_for(lambda: connection.keys("omlx:lead:*"))
    assert connection.keys("omlx:lead:*") == []


# Bounds


def test_expired_leases_return_in_bounded_calls_the_oldest_in_front(connection: Redis) -> None:
    ids = abandon(connection, 250)
    fresh = enqueue(connection)
    assert sizes(Upkeep(table(connection)).sweep()) == [100, 100, 50]
    assert waiting(connection) == [*ids, fresh.id]


def test_many_leases_that_were_renewed_together_return_in_the_order_of_their_claims(
    connection: Redis,
) -> None:
    jobs = [enqueue(connection).id for _ in range(120)]
    dead = table(connection, "dead")
    claim(dead, 70)
    claim(dead, 50)
    dead.renew()
    forward(connection, 31)
    sweep(table(connection, "other"))
    assert waiting(connection) == jobs


def test_entries_of_stock_workers_hide_no_expired_lease(connection: Redis) -> None:
    ids = abandon(connection, 3)
    now = time.time()
    connection.zadd(WIP, {f"stock-{n}:{'a' * 32}": now + 7 * 86_400 - 9 for n in range(250)})
    assert sizes(Upkeep(table(connection)).sweep()) == [3]
    assert waiting(connection) == ids
    assert connection.zcard(WIP) == 250


def test_expired_entries_leave_registries_a_bounded_number_a_call(connection: Redis) -> None:
    keys = [f"rq:{name}:{QUEUE}" for name in ("finished", "failed")]
    expired = {f"expired-{n}": 1 for n in range(250)}
    for key in keys:
        connection.zadd(key, expired | {"kept": 2**40, "endless": -1})
    connection.zadd(f"rq:canceled:{QUEUE}", expired)
    left = [connection.zcard(keys[0]) for _ in Upkeep(table(connection)).sweep()]
    assert max(before - after for before, after in itertools.pairwise(left)) == MOST_ENTRIES
    assert [connection.zrange(key, 0, -1) for key in keys] == [[b"endless", b"kept"]] * 2
    assert not connection.exists(f"rq:canceled:{QUEUE}")


def test_a_clean_up_that_the_next_sweep_cuts_short_goes_on_with_it(connection: Redis) -> None:
    key, upkeep = f"rq:finished:{QUEUE}", Upkeep(table(connection))
    connection.zadd(key, {f"expired-{n}": 1 for n in range(250)})
    next(0 for _ in upkeep.sweep() if connection.zcard(key) < 250)
    for _ in upkeep.sweep():
        pass
    assert not connection.exists(key)


def test_rows_of_many_batches_are_mended_a_bounded_number_a_call(connection: Redis) -> None:
    runs = [f"{n:016x}" for n in range(130)]
    with connection.pipeline() as pipeline:
        for run in runs:
            batch = Batch(connection, run)
            pipeline.zadd("omlx:batches", {run: 1})
            pipeline.hset(batch.key, mapping={"state": "running", "left": 3})
            rows = {str(n): f'{n} aa now "r{n}"\nbody' for n in range(3)}
            pipeline.hset(f"{batch.key}:running:{QUEUE}", mapping=rows)
        pipeline.execute()
    waiting_rows = [Batch(connection, run).waiting_key(QUEUE) for run in runs]
    mended = [sum(map(connection.llen, waiting_rows)) for _ in Upkeep(table(connection)).sweep()]
    assert max(after - before for before, after in itertools.pairwise(mended)) <= MOST_ENTRIES + 3
    assert mended[-1] == 3 * len(runs)
    assert connection.zcard(open_key(QUEUE)) == len(runs)


def test_every_row_that_lost_its_job_waits_again_in_the_end(connection: Redis) -> None:
    batch = Batch(connection, "0" * 16)
    connection.zadd("omlx:batches", {batch.run: 1})
    connection.hset(batch.key, mapping={"state": "running", "left": 300})
    rows = {str(n): f'{n} aa now "r{n}"\nbody' for n in range(300)}
    connection.hset(f"{batch.key}:running:{QUEUE}", mapping=rows)
    for _ in range(3):
        sweep(table(connection))
    assert connection.llen(batch.waiting_key(QUEUE)) == 300


# Turns


def test_a_long_sweep_goes_on_from_turn_to_turn(connection: Redis) -> None:
    ids = abandon(connection, 250)
    upkeep = Upkeep(table(connection), Clock(look=0.2))
    turns = []
    for _ in range(4):
        upkeep.attend()
        turns.append(len(waiting(connection)))
    assert turns == [0, 100, 200, 250]
    assert waiting(connection) == ids


def test_idle_workers_are_rung_for_the_jobs_that_are_back(connection: Redis) -> None:
    with connection.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(wake_channel(ALIAS))
        heard.get_message(timeout=5)
        abandon(connection, 250)
        Upkeep(table(connection), Clock()).attend()
        rings = [heard.get_message(timeout=5)["data"] for _ in range(3)]
    assert rings == [b"100", b"100", b"50"]


def test_an_outage_postpones_the_sweep(connection: Redis) -> None:
    clock = Clock()
    leases = table(connection)
    upkeep = Upkeep(leases, clock)
    abandon(connection, 1)
    upkeep.postpone()
    upkeep.attend()
    assert waiting(connection) == []
    clock.now += leases.seconds / 4
    upkeep.attend()
    assert len(waiting(connection)) == 1
