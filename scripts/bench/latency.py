#!/usr/bin/env python
"""Measure what the queue adds to the time to the first token, on an idle worker over the loopback.

    python scripts/bench/latency.py                     200 jobs, an engine of 5 ms a step
    python scripts/bench/latency.py --jobs 1000 --step 0.002

The worker is a process of its own, with an engine that only sleeps; before every job it is idle. A
job's time runs from the call of `Producer.submit` to the first event of its stream in the same
process, less the one step that the engine takes. The server runs on this machine and keeps an
append-only file, synced every second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from redis import Redis
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "producer"), str(ROOT / "worker")]

from omlx_producer import Producer  # noqa: E402
from omlx_worker.queue.embedded import EmbeddedRedis  # noqa: E402
from tests.helpers.workers import ALIAS, SCRIPT  # noqa: E402

PAUSE_SECONDS = 0.05
START_SECONDS = 60.0


def measure(producer: Producer, jobs: int, step: float) -> tuple[list[float], list[float]]:
    """Seconds of each job: in `submit`, and from its call to the first token, less the step."""
    submits, firsts = [], []
    for _ in range(jobs):
        time.sleep(PAUSE_SECONDS)
        began = time.perf_counter()
        job = producer.submit(model=ALIAS, prompt="def fibonacci(n):", max_completion_tokens=2)
        submits.append(time.perf_counter() - began)
        with job.stream() as events:
            next(events)
            firsts.append(time.perf_counter() - began - step)
            # To its end, so that the worker is idle again.
            for _ in events:
                pass
    return submits, firsts


def wait_for_model(producer: Producer) -> None:
    deadline = time.monotonic() + START_SECONDS
    while ALIAS not in producer.models():
        if time.monotonic() > deadline:
            raise SystemExit("the worker has not started")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--step", type=float, default=0.005, help="seconds of one decode step")
    options = parser.parse_args()
    with TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        worker = subprocess.Popen(
            [sys.executable, str(SCRIPT), server.url, f"--step-seconds={options.step}"]
        )
        try:
            with Redis.from_url(server.url) as connection:
                producer = Producer(connection)
                wait_for_model(producer)
                measure(producer, 10, options.step)
                submits, firsts = measure(producer, options.jobs, options.step)
        finally:
            worker.terminate()
            worker.wait(20)
    table = Table("milliseconds", "median", "p90", "p99")
    for name, seconds in (("submit", submits), ("to the first token, less the engine", firsts)):
        cuts = statistics.quantiles(seconds, n=100)
        table.add_row(name, *(f"{1000 * cuts[at - 1]:.2f}" for at in (50, 90, 99)))
    Console().print(table)
    print(f"{options.jobs} jobs, {1000 * options.step:g} ms a step")


if __name__ == "__main__":
    main()
