"""Worker processes of benchmarks, and waiting until they serve."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from redis import Redis

from omlx_producer.client.workers import read_workers
from omlx_producer.producer import Producer

LOAD_SECONDS = 600.0
STOP_SECONDS = 60.0
IDLE_SECONDS, IDLE_SHARE = 10.0, 0.1
"""For so long an idle process takes at most this share of a processor."""

Process = subprocess.Popen[bytes]


@contextmanager
def running(*command: str, env: Mapping[str, str] | None = None) -> Iterator[Process]:
    """A Python process that is told to end at the end of the block."""
    process = subprocess.Popen([sys.executable, *command], env={**os.environ, **(env or {})})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def worker(
    url: str, alias: str, options: Mapping[str, object], env: Mapping[str, str] | None = None
) -> Iterator[Process]:
    """A worker as a user would start it.

    Args:
        options: of `omlx-worker run`, without their dashes.
    """
    start = ("-c", "from omlx_worker.cli import main; main()", "run")
    named = {"redis-url": url, "model-alias": alias, **options}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    with running(*start, *words, env=env) as process:
        yield process


def wait_until_served(
    producer: Producer, aliases: Sequence[str], workers: Sequence[Process]
) -> None:
    """Wait until every worker and every alias is served; exit if that fails."""
    deadline = time.monotonic() + LOAD_SECONDS
    connection: Redis = producer.connection

    def serving() -> set[str]:
        found = (each for alias in aliases for each in read_workers(connection, alias))
        return {each.name for each in found if not each.is_loading}

    while set(aliases) - set(producer.models()) or len(serving()) < len(workers):
        for process in workers:
            if process.poll() is not None:
                sys.exit(f"a worker ended with code {process.returncode}; see its messages above")
        if time.monotonic() > deadline:
            sys.exit(f"the workers did not load the model within {LOAD_SECONDS:g} s")
        time.sleep(0.1)


def wait_until_idle(process: Process) -> None:
    """Wait for the end of a worker's warm-up, which no figure tells; exit if it goes on and on."""
    before, deadline = -IDLE_SECONDS, time.monotonic() + LOAD_SECONDS
    while (now := _processor_seconds(process.pid)) > before + IDLE_SHARE * IDLE_SECONDS:
        if time.monotonic() > deadline:
            sys.exit(f"a worker's warm-up did not end within {LOAD_SECONDS:g} s")
        before = now
        time.sleep(IDLE_SECONDS)


def _processor_seconds(pid: int) -> float:
    """What a process has taken so far, as `ps` tells on Linux and on a Mac: ``[[h:]m:]s``."""
    told = subprocess.run(
        ["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return sum(float(part) * 60**place for place, part in enumerate(told.stdout.split(":")[::-1]))
