"""The processes of the whole path: the worker, and a stock RQ worker to compare it with."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.protocol import GenerationRequest
from scripts.bench.pipeline.lap import CpuClock

STOCK_QUEUE = "stock"
POLL_SECONDS = 0.005
LEASE_SECONDS = 30

Running = AbstractContextManager[subprocess.Popen[bytes]]


@contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process, told to end and awaited at the end of the block."""
    started = subprocess.Popen([sys.executable, *command])
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def queue_worker(
    url: str, model: str, alias: str, mode: str, depth: int, max_batch: int
) -> Running:
    """The real worker, as a user would start it."""
    start = "from omlx_worker.cli import main; main()"
    options = {
        "--model": model,
        "--redis-url": url,
        "--model-alias": alias,
        "--mode": mode,
        "--mtp-depth": depth,
        "--max-batch": max_batch,
    }
    listed = [str(part) for option in options.items() for part in option]
    return _process("-c", start, "run", *listed)


def sleeping_worker(script: Path, url: str, step: float, max_batch: int) -> Running:
    """The same worker over an engine that sleeps for each step."""
    options = (f"--step-seconds={step}", f"--max-rows={max_batch}")
    return _process(str(script), url, *options, f"--lease-seconds={LEASE_SECONDS}")


def stock_worker(url: str, model: str) -> Running:
    return _process("-m", "scripts.bench.stock_job", url, STOCK_QUEUE, model)


class StockSide:
    """RQ's own SimpleWorker, in a process of its own, one job at a time through mlx-lm."""

    name = "stock RQ"

    def __init__(self, connection: Redis, process: int) -> None:
        self._queue = Queue(STOCK_QUEUE, connection=connection, serializer=JSONSerializer)
        self._process = process

    def lap(self, requests: Sequence[GenerationRequest]) -> dict[str, Any]:
        """Tokens per second from the first enqueue to the last result; it streams nothing."""
        cpu = CpuClock(worker=self._process)
        began = time.perf_counter()
        jobs = [
            self._queue.enqueue(
                "scripts.bench.stock_job.generate",
                kwargs={"prompt": request.prompt, "tokens": request.max_completion_tokens},
                job_timeout=600,
            )
            for request in requests
        ]
        tokens = sum(_result(job) for job in jobs)
        return {
            "tokens_per_second": tokens / (time.perf_counter() - began),
            "jobs": len(jobs),
            "cpu": cpu.stop(),
        }


def _result(job: Job) -> int:
    while not job.is_finished:
        if job.is_failed:
            sys.exit(f"the stock job failed: {job.latest_result()}")
        time.sleep(POLL_SECONDS)
    return int(job.return_value())
