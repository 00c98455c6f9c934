"""What do idle workers cost their Redis, and how many of them does one submission wake?

    python -m scripts.bench.fleet                    20 and 60 workers, scaled to 1,000
    python -m scripts.bench.fleet --workers 10 40 --seconds 30

The workers are real ones with an engine that does nothing, in two processes. The share of the
server's thread is what it spends of its own CPU time. Two numbers of workers separate what each
worker costs (it grows with their number) from what all cost by looking at all (its square).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from redis import Redis
from rich.console import Console
from rich.table import Table

from omlx_producer import Producer
from omlx_worker.queue.embedded import EmbeddedRedis
from tests.helpers.workers import ALIAS, running_worker

PROCESSES = 2
SETTLE_SECONDS = 6.0
WAKE_SECONDS = 0.15
SUBMISSIONS = 10
TARGET = 1000


class Idle(NamedTuple):
    """Of idle workers: the share of the server's thread, and its parts by command."""

    share: float
    by_command: dict[str, float]
    woken: float


def be_workers(url: str, count: int, over: Event) -> None:
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as workers:
        for _ in range(count):
            workers.enter_context(running_worker(url))
        over.wait()


def spent(connection: Redis) -> tuple[float, dict[str, float], int]:
    """Seconds of CPU of the server, those by command, and the scripts that were called."""
    cpu: Any = connection.info("cpu")
    stats: Any = connection.info("commandstats")
    by_command = {name.removeprefix("cmdstat_"): each["usec"] / 1e6 for name, each in stats.items()}
    scripts = stats.get("cmdstat_evalsha", {"calls": 0})["calls"]
    return cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], by_command, scripts


def woken_by_one(connection: Redis, idle_rate: float) -> float:
    """Workers that look at their queues because of one submission, on average."""
    calls = 0.0
    with Producer(connection) as producer:
        for _ in range(SUBMISSIONS):
            before = spent(connection)[2]
            job = producer.submit(
                model=ALIAS, prompt="x", max_completion_tokens=1, require_known_model=False
            )
            time.sleep(WAKE_SECONDS)
            # A look is two scripts. The worker that takes the job also appends and commits.
            calls += (spent(connection)[2] - before - idle_rate * WAKE_SECONDS - 2) / 2
            job.result(timeout=10)
            time.sleep(1)
    return max(0.0, calls / SUBMISSIONS)


def measure(count: int, seconds: float) -> Idle:
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        over = context.Event()
        processes = [
            context.Process(target=be_workers, args=(server.url, count // PROCESSES, over))
            for _ in range(PROCESSES)
        ]
        for process in processes:
            process.start()
        with Redis.from_url(server.url) as connection:
            while connection.hlen(f"omlx:workers:{ALIAS}") < count // PROCESSES * PROCESSES:
                time.sleep(0.2)
            time.sleep(SETTLE_SECONDS)
            before, began = spent(connection), time.monotonic()
            time.sleep(seconds)
            after, took = spent(connection), time.monotonic() - began
            woken = woken_by_one(connection, (after[2] - before[2]) / took)
        over.set()
        for process in processes:
            process.join()
    by_command = {name: (used - before[1].get(name, 0.0)) / took for name, used in after[1].items()}
    return Idle((after[0] - before[0]) / took, by_command, woken)


def scaled(small: tuple[int, float], large: tuple[int, float]) -> float:
    """What `TARGET` workers cost, if the cost is a * n + b * n * n with neither below zero."""
    (n, cost), (m, more) = small, large
    b = max(0.0, (more / m - cost / n) / (m - n))
    a = max(0.0, more / m - b * m)
    return a * TARGET + b * TARGET**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs=2, default=[20, 60])
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    small, large = options.workers
    few, many = measure(small, options.seconds), measure(large, options.seconds)
    table = Table("idle workers", str(small), str(large), f"scaled to {TARGET:,}")

    def row(name: str, less: float, more: float) -> None:
        table.add_row(
            name, f"{less:.3%}", f"{more:.3%}", f"{scaled((small, less), (large, more)):.1%}"
        )

    row("share of the server's thread", few.share, many.share)
    for name, more in sorted(many.by_command.items(), key=lambda item: -item[1])[:8]:
        row(f"  {name}", few.by_command.get(name, 0.0), more)
    table.add_row("woken by one submission", f"{few.woken:.1f}", f"{many.woken:.1f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
