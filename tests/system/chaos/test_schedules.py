"""Random schedules: ``--chaos-schedules 1000`` for the long form, ``--chaos-seed`` for others.

Schedules mostly wait, so let several run at once: ``-n 8`` on two cores. Servers of even seeds may
come back without their last writes, as with ``appendfsync everysec``. Those of odd seeds may lose
nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.chaos.processes import Nursery
from tests.system.chaos.schedule import Schedule
from tests.system.chaos.world import world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first: int = metafunc.config.getoption("--chaos-seed")
        count: int = metafunc.config.getoption("--chaos-schedules")
        metafunc.parametrize("seed", range(first, first + count), ids="seed-{}".format)


@pytest.fixture(autouse=True)
def _quick_to_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omlx_producer.connection.LONGEST_BLOCK_SECONDS", 0.5)


def test_schedule(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    may_lose = seed % 2 == 0
    fsync = "everysec" if may_lose else "always"
    with world(nursery, tmp_path, fsync, lease_seconds=0.5) as place:
        place.note(f"seed {seed}")
        Schedule(seed, place, tmp_path, may_lose=may_lose).run()
