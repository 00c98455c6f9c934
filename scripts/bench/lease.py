"""How many jobs a second do claim and commit take, the engine stubbed, beside stock RQ?

    python -m scripts.bench.lease                       10,000 jobs, claims of 1, 16 and 64
    python -m scripts.bench.lease --jobs 2000 --batches 64

Every job is claimed, ended with a result of some hundred bytes and a terminal event, and stays in
RQ's finished registry. Claims and commits run on two threads, as in the worker. The time to enqueue
does not count. Stock RQ runs its SimpleWorker, which does not fork, on `dict`. The server runs on
this machine with an append-only file, synced every second.
"""

from __future__ import annotations

import argparse
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import BoundedSemaphore
from typing import NamedTuple

from redis import Redis
from rich.console import Console
from rich.table import Table
from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from omlx_producer import End, EndEvent, GenerationRequest, Usage
from omlx_producer.client.enqueue import JobTimes, NewJob, enqueue
from omlx_producer.wire import PRIORITIES, queue_name
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.queue.ending import Commit, Ending
from omlx_worker.queue.lease import LeaseTable

ALIAS = "bench"
CHUNK = 500
CLAIMS_AHEAD = 2
USAGE = Usage(prompt_tokens=20, completion_tokens=64, total_tokens=84)
BODY = {
    "object": "text_completion",
    "model": ALIAS,
    "choices": [{"index": 0, "text": "x" * 256, "finish_reason": "stop", "logprobs": None}],
    "usage": USAGE.model_dump(),
}


class Lap(NamedTuple):
    """Seconds: of the clock, and spent in claims and in commits, which run side by side."""

    seconds: float
    claiming: float
    committing: float


def fill(connection: Redis, count: int) -> None:
    connection.flushall()
    queue = Queue(queue_name(ALIAS, "bulk"), connection=connection, serializer=JSONSerializer)
    request = GenerationRequest(model=ALIAS, prompt="def fibonacci(n):", max_completion_tokens=64)
    for start in range(0, count, CHUNK):
        jobs = [
            NewJob(f"job{start + n}", request, "bulk") for n in range(min(CHUNK, count - start))
        ]
        enqueue(connection, jobs, JobTimes(), lambda _: queue)


def ending(job: Claim) -> Ending:
    event = EndEvent.of(job.id, 64, End(), finish_reasons=["stop"], usage=USAGE)
    return Ending(event, result={"id": f"cmpl-{job.id}", **BODY})


def measure(connection: Redis, count: int, batch: int) -> Lap:
    """Claim on one thread and commit on another, as the worker does, until all jobs are ended."""
    fill(connection, count)
    queues = [queue_name(ALIAS, priority) for priority in PRIORITIES]
    leases = LeaseTable(connection, "bench", queues)
    running: SimpleQueue[list[Claim]] = SimpleQueue()
    room = BoundedSemaphore(CLAIMS_AHEAD)
    clock = time.perf_counter

    def claim() -> float:
        spent = 0.0
        while True:
            room.acquire()
            began = clock()
            claimed = leases.claim(batch)
            spent += clock() - began
            running.put(claimed or [])
            if not claimed:
                return spent

    def commit() -> float:
        spent = 0.0
        while claimed := running.get():
            began = clock()
            verdicts = leases.commit([(job, ending(job)) for job in claimed])
            spent += clock() - began
            room.release()
            assert all(verdict is Commit.DONE for verdict in verdicts)
        return spent

    began = clock()
    with ThreadPoolExecutor(2) as threads:
        claiming, committing = (threads.submit(task) for task in (claim, commit))
    seconds = clock() - began
    assert connection.zcard(f"rq:finished:{queue_name(ALIAS, 'bulk')}") == count
    return Lap(seconds, claiming.result(), committing.result())


def measure_stock(connection: Redis, count: int) -> float:
    """Seconds for as many jobs through RQ's own worker."""
    connection.flushall()
    queue = Queue("stock", connection=connection, serializer=JSONSerializer)
    data = [queue.prepare_data("builtins.dict", kwargs=BODY) for _ in range(count)]
    queue.enqueue_many(data)
    worker = SimpleWorker([queue], connection=connection, serializer=JSONSerializer)
    worker.log_job_description = False
    began = time.perf_counter()
    worker.work(burst=True)
    assert queue.finished_job_registry.count == count
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--stock-jobs", type=int, default=2_000)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--laps", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    table = Table("worker", "claimed at once", "claim, µs/job", "commit, µs/job", "jobs/s")
    with TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        connection = Redis.from_url(server.url)
        for batch in options.batches:
            laps = [measure(connection, options.jobs, batch) for _ in range(options.laps)]
            lap = min(laps)
            table.add_row(
                "omlx-queue",
                str(batch),
                f"{1e6 * lap.claiming / options.jobs:.0f}",
                f"{1e6 * lap.committing / options.jobs:.0f}",
                f"{options.jobs / lap.seconds:,.0f}",
            )
        seconds = min(measure_stock(connection, options.stock_jobs) for _ in range(options.laps))
        table.add_row("rq SimpleWorker", "1", "", "", f"{options.stock_jobs / seconds:,.0f}")
    Console().print(table)
    print(f"the best of {options.laps} laps, over {options.jobs} and {options.stock_jobs} jobs")


if __name__ == "__main__":
    main()
