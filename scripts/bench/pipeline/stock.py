"""A stock RQ worker, in a process of its own, to compare the worker with."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_producer.wire import GenerationRequest
from scripts.bench.pipeline.lap import CpuClock

STOCK_QUEUE = "stock"
POLL_SECONDS = 0.005


class StockSide:
    """RQ's own SimpleWorker, one job at a time through mlx-lm's `generate_step`."""

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
