"""Random schedules whose clients go through gateways, which are killed and paused, too.

``--chaos-gateway-schedules 300`` for the long form, ``--chaos-seed`` for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from redis import Redis

from tests.system.chaos.gateways import Chat, FileBatch, Gateways, HttpClient
from tests.system.chaos.processes import Nursery
from tests.system.chaos.world import TICK, World, world

LEASE_SECONDS = 0.5
SETTLE_SECONDS = 40.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first: int = metafunc.config.getoption("--chaos-seed")
        count: int = metafunc.config.getoption("--chaos-gateway-schedules")
        metafunc.parametrize("seed", range(first, first + count), ids="seed-{}".format)


def opened_batches(connection: Redis) -> list[bytes]:
    """The states of the batches of the queue that were ever open."""
    keys = [key for key in connection.keys("omlx:batch:*") if key.count(b":") == 2]
    states = [connection.hget(key, "state") for key in keys]
    # What a gateway has begun before it was killed expires.
    return [state for state in states if state not in (None, b"uploading")]


def disturb(place: World, gateways: Gateways, random: Random) -> None:
    """One of the faults; every schedule has some."""

    def kill_worker() -> None:
        if standing := place.standing():
            worker = random.choice(standing)
            place.note(f"worker {worker.pid} is killed")
            worker.kill()

    def cut_connections() -> None:
        cut = place.connection.client_kill_filter(_type="normal", skipme=True)
        place.note(f"{cut} connections are cut")

    faults: list[Callable[[], None]] = [
        kill_worker,
        cut_connections,
        lambda: gateways.kill_one(random),
        lambda: gateways.kill_one(random),
        lambda: gateways.pause_one(random, random.uniform(0.2, 2.5)),
        lambda: place.restart_server(random.uniform(0, 1.5) * LEASE_SECONDS),
        lambda: place.freeze_server(random.uniform(0.1, 1.5) * LEASE_SECONDS),
    ]
    random.choice(faults)()


def test_schedule(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    random = Random(seed)
    with world(nursery, tmp_path, "always", LEASE_SECONDS) as place:
        place.note(f"seed {seed}")
        place.start_worker()
        place.wait_for(lambda: place.connection.exists("omlx:models"))
        gateways = Gateways(place, tmp_path, 2)
        chats = [Chat(gateways.urls, random, number) for number in range(random.randint(3, 6))]
        batches = [
            FileBatch(gateways.urls, random, tmp_path / f"batch-{number}.jsonl")
            for number in range(random.randint(0, 2))
        ]
        clients: list[HttpClient] = [*chats, *batches]
        problems: list[str] = []
        try:
            for client in clients:
                client.start()
            for _ in range(random.randint(3, 7)):
                time.sleep(random.uniform(0, 0.4))
                disturb(place, gateways, random)
                problems += gateways.replace_the_fallen()
                if not place.standing():
                    place.start_worker()
            gateways.kill_one(random)
            deadline = time.monotonic() + SETTLE_SECONDS
            while any(client.is_alive() for client in clients) and time.monotonic() < deadline:
                problems += gateways.replace_the_fallen()
                if not place.standing():
                    place.start_worker()
                time.sleep(TICK)
            place.jobs = [chat.job for chat in chats]
            place.settle()
        finally:
            for client in clients:
                client.dismiss()
                client.join()
            gateways.dismiss()
        opened = opened_batches(place.connection)
        if opened != [b"done"] * len(batches):
            problems.append(f"{len(batches)} batches have become {opened}")
        place.check([*problems, *(each for client in clients for each in client.problems)])
