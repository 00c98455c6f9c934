"""Random schedules: ``--chaos-schedules 200`` for the long form, ``--chaos-seed`` for others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.chaos.processes import Nursery
from tests.system.chaos.schedule import Schedule
from tests.system.chaos.world import world

pytestmark = pytest.mark.system


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first: int = metafunc.config.getoption("--chaos-seed")
        count: int = metafunc.config.getoption("--chaos-schedules")
        metafunc.parametrize("seed", range(first, first + count), ids="seed-{}".format)


def test_schedule(seed: int, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path, fsync="always" if seed % 2 else "everysec") as place:
        place.note(f"seed {seed}")
        Schedule(seed, place).run()
        place.check()
