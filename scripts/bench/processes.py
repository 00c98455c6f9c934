"""Worker processes of benchmarks, waiting until they serve, and runs of files through them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from redis import Redis

from omlx_producer.client.workers import WorkerFigures, read_workers
from omlx_producer.producer import Producer
from omlx_worker.processes import Child, how_ended, wait_until

LOAD_SECONDS = 600.0
STOP_SECONDS = 60
FIGURES_SECONDS = 20.0
IDLE_SECONDS, IDLE_SHARE = 10.0, 0.1
"""For so long an idle process takes at most this share of a processor."""


@contextmanager
def running(*command: str, env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """A Python process that is told to end at the end of the block."""
    child = Child(
        [sys.executable, *command], seconds=STOP_SECONDS, env={**os.environ, **(env or {})}
    )
    try:
        yield child
    finally:
        child.end(STOP_SECONDS)


@contextmanager
def worker(
    url: str,
    alias: str,
    options: Mapping[str, object],
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-c", "from omlx_worker.cli import main; main()"),
) -> Iterator[Child]:
    """A worker as a user would start it.

    Args:
        options: of `omlx-worker run`, without their dashes.
        program: what runs its commands in Python.
    """
    start = (*program, "run")
    named = {"redis-url": url, "model-alias": alias, **options}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    with running(*start, *words, env=env) as process:
        yield process


def wait_until_served(producer: Producer, aliases: Sequence[str], workers: Sequence[Child]) -> None:
    """Wait until every worker and every alias is served; exit if that fails."""
    connection: Redis = producer.connection

    def all_serve() -> bool:
        found = (each for alias in aliases for each in read_workers(connection, alias))
        serving = {each.name for each in found if not each.is_loading}
        return set(aliases) <= set(producer.models()) and len(serving) >= len(workers)

    def all_run() -> None:
        for each in workers:
            if (code := each.code) is not None:
                sys.exit(f"a worker {how_ended(code)}; see its messages above")

    if not wait_until(all_serve, all_run, LOAD_SECONDS):
        sys.exit(f"the workers did not load the model within {LOAD_SECONDS:g} s")


def wait_until_idle(process: Child) -> None:
    """Wait for the end of a worker's warm-up, which no figure tells; exit if it goes on and on."""
    before, deadline = -IDLE_SECONDS, time.monotonic() + LOAD_SECONDS
    while (now := _processor_seconds(process.pid)) > before + IDLE_SHARE * IDLE_SECONDS:
        if time.monotonic() > deadline:
            sys.exit(f"a worker's warm-up did not end within {LOAD_SECONDS:g} s")
        before = now
        time.sleep(IDLE_SECONDS)


def submit(url: str, *words: object) -> float:
    """Run `omlx-submit` with these words; returns the seconds that it took. Exits if it fails."""
    command = [sys.executable, "-c", "from omlx_producer.cli.main import main; main()"]
    command += [*map(str, words), "--redis-url", url]
    began = time.perf_counter()
    client = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if client.returncode:
        sys.exit(f"omlx-submit {how_ended(client.returncode)}: {client.stderr}")
    return seconds


def idle_figures(producer: Producer, alias: str, tokens: int) -> WorkerFigures:
    """The figures of an alias's worker once it counts this many tokens and has no jobs; exits if
    that does not come."""

    def told() -> WorkerFigures | None:
        found = read_workers(producer.connection, alias)
        return next((each for each in found if each.tokens >= tokens and not each.jobs), None)

    if figures := wait_until(told, seconds=FIGURES_SECONDS):
        return figures
    sys.exit(f"the worker of {alias} does not tell its figures")


def _processor_seconds(pid: int) -> float:
    """What a process has taken so far, as `ps` tells on Linux and on a Mac: ``[[h:]m:]s``."""
    told = subprocess.run(
        ["ps", "-o", "time=", "-p", str(pid)], capture_output=True, text=True, check=True
    )
    return sum(float(part) * 60**place for place, part in enumerate(told.stdout.split(":")[::-1]))
