"""A real worker on the demo model, as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from redis import Redis

from omlx_producer.client.workers import read_workers


@contextlib.contextmanager
def worker(
    redis_url: str, *options: str, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A real worker process on the demo model, ended by SIGTERM; its stderr goes to ``log``."""
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    written = log.open("wb") if log else None
    process = subprocess.Popen(
        [*command, "--model", "demo", "--redis-url", redis_url, *options],
        env=environment,
        stderr=written,
    )
    try:
        with Redis.from_url(redis_url) as connection:
            deadline = time.monotonic() + 120
            while all(each.is_loading for each in read_workers(connection, "demo")):
                assert process.poll() is None, "the worker ended before it was ready"
                assert time.monotonic() < deadline, "the worker did not get ready"
                time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(90) in {0, 128 + signal.SIGTERM}
        if written:
            written.close()
