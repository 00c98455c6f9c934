"""A worker process that a certain prompt kills, as an abort in the engine's own code does."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "producer"), str(ROOT / "worker")]

from redis import Redis  # noqa: E402

from omlx_worker.control.worker import GenerationWorker  # noqa: E402
from omlx_worker.engine.rows.emission import Emission  # noqa: E402
from omlx_worker.settings import WorkerSettings  # noqa: E402
from tests.helpers.fake_engine import FakeEngine  # noqa: E402

SCRIPT = Path(__file__)
DEADLY = "deadly"


class DeadlyEngine(FakeEngine):
    def step(self, depth: int | None = None) -> list[Emission]:
        if any(row.request.prompt == list(map(ord, DEADLY)) for row in self.states):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(depth)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    url, name = sys.argv[1:]
    GenerationWorker(
        WorkerSettings(model="demo", model_alias="fake", name=name or None, lease_seconds=1.0),
        lambda *_: DeadlyEngine(max_rows=8, step_seconds=0.005),
        connection=Redis.from_url(url),
    ).work()
