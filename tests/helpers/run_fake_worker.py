"""A worker process with the fake engine, for tests that send signals."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "producer"), str(ROOT / "worker")]

from redis import Redis  # noqa: E402

from omlx_worker.control.worker import GenerationWorker  # noqa: E402
from omlx_worker.logs import start_logging  # noqa: E402
from omlx_worker.settings import WorkerSettings  # noqa: E402
from tests.helpers.fake_engine import FakeEngine  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--max-rows", type=int, default=4)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    parser.add_argument("--vector-size", type=int, default=0)
    parser.add_argument("--lease-seconds", type=float, default=1.0)
    parser.add_argument("--drain-timeout", type=float, default=20.0)
    parser.add_argument("--name")
    parser.add_argument("--alias", default="fake")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", default="text")
    options = parser.parse_args()
    start_logging(options.log_level, options.log_format)
    settings = WorkerSettings(
        model="demo",
        model_alias=options.alias,
        name=options.name,
        max_batch=options.max_rows,
        lease_seconds=options.lease_seconds,
        drain_timeout=options.drain_timeout,
    )
    worker = GenerationWorker(
        settings,
        lambda *_: FakeEngine(options.max_rows, options.step_seconds, options.vector_size),
        connection=Redis.from_url(options.url),
    )
    worker.work()
    sys.exit(worker.exit_code)


if __name__ == "__main__":
    main()
