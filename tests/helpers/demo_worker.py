"""A real worker on the demo model, as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from redis import Redis

from omlx_producer.client.workers import read_workers
from omlx_worker.processes import wait_until


@contextlib.contextmanager
def worker(
    redis_url: str, *options: str, model: Path | str = "demo", log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A real worker process on the demo model, ended by SIGTERM unless the test has killed it.

    Args:
        model: a form of the demo model.
        log: where its stderr goes.
    """
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    written = log.open("wb") if log else None
    process = subprocess.Popen(
        [
            *(*command, "--model", str(model), "--model-alias", "demo"),
            *("--redis-url", redis_url, *options),
        ],
        env=environment,
        stderr=written,
    )
    try:
        with Redis.from_url(redis_url) as connection:

            def serves() -> bool:
                assert process.poll() is None, "the worker ended before it was ready"
                return any(not each.is_loading for each in read_workers(connection, "demo"))

            assert wait_until(serves, seconds=120), "the worker did not get ready"
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(90) in {0, 128 + signal.SIGTERM, -signal.SIGKILL}
        if written:
            written.close()
