"""The server restarts, refuses, hangs, is full or read-only: workers wait, within a bound."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from omlx_producer.wire import events_key
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import submit, submit_some
from tests.system.chaos.world import LEASE_SECONDS, World, world

TROUBLES: dict[str, Callable[[World], None]] = {
    "restart": lambda place: place.restart_server(0.3),
    "restart-longer-than-a-lease": lambda place: place.restart_server(1.5 * LEASE_SECONDS),
    "freeze": lambda place: place.freeze_server(0.5),
    "freeze-longer-than-a-lease": lambda place: place.freeze_server(1.5 * LEASE_SECONDS),
    "full": lambda place: place.fill_memory(0.5),
    "full-longer-than-a-lease": lambda place: place.fill_memory(1.5 * LEASE_SECONDS),
    "read-only": lambda place: place.refuse_writes(1.5 * LEASE_SECONDS),
}


def tokens_flow(place: World, jobs: int) -> bool:
    return all(place.connection.xlen(events_key(job.id)) > 2 for job in place.jobs[:jobs])


@pytest.mark.parametrize(
    ("trouble", "fsync"),
    [*[(trouble, "everysec") for trouble in TROUBLES], ("restart", "always")],
)
def test_workers_outlast(trouble: str, fsync: str, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path, fsync) as place:
        place.jobs = [
            submit(place.connection, f"p{number}", max_completion_tokens=80) for number in range(3)
        ]
        place.jobs += submit_some(place.connection, Random(3), 5)
        for _ in range(2):
            place.start_worker(step_seconds=0.02, max_rows=2)
        place.wait_for(lambda: tokens_flow(place, 1))
        TROUBLES[trouble](place)
        place.settle()
        place.check()
        assert len(place.workers) == 2, place.story()


def test_connections_that_are_cut_again_and_again(nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        place.jobs = submit_some(place.connection, Random(11), 12)
        for _ in range(2):
            place.start_worker(step_seconds=0.01)
        for _ in range(15):
            place.connection.client_kill_filter(_type="normal", skipme=True)
            place.connection.client_kill_filter(_type="pubsub")
            time.sleep(0.05)
        place.settle()
        place.check()
        assert len(place.workers) == 2, place.story()


def start_busy(place: World, **orders: float) -> None:
    place.jobs = [
        submit(place.connection, f"p{number}", max_completion_tokens=600) for number in range(3)
    ]
    place.start_worker(step_seconds=0.02, **orders)
    place.wait_for(lambda: tokens_flow(place, 3))


@pytest.mark.parametrize("trouble", ["away", "full"])
def test_after_its_grace_a_worker_ends_with_an_error(
    trouble: str, nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        start_busy(place, redis_grace=0.5)
        (worker,) = place.workers
        if trouble == "away":
            place.server.kill()
        else:
            place.connection.config_set("maxmemory", 1)
        place.wait_for_fall(worker)
        assert worker.code == 3, place.story()
        if trouble == "full":
            place.connection.config_set("maxmemory", 0)
            place.check_at_rest()


@pytest.mark.parametrize(("signals", "code"), [(1, 3), (2, 128 + signal.SIGTERM)])
def test_a_worker_told_to_end_while_redis_is_away_does_not_claim_success(
    signals: int, code: int, nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path, "always") as place:
        start_busy(place)
        (worker,) = place.workers
        place.server.kill()
        for _ in range(signals):
            worker.send(signal.SIGTERM)
            time.sleep(0.2)
        place.wait_for_fall(worker)
        assert worker.code == code, place.story()
        place.server.start()
        place.settle(60, step_seconds=0.0)
        place.check()


def test_a_worker_started_while_redis_is_full_waits_for_room(
    nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        place.jobs = submit_some(place.connection, Random(2), 3)
        place.connection.config_set("maxmemory", 1)
        worker = place.start_worker()
        place.wait_for(lambda: "Redis is unavailable" in place.story())
        assert worker.alive
        place.connection.config_set("maxmemory", 0)
        place.settle()
        place.check()
        assert place.workers == [worker]
