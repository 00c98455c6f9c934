"""What does a client pay to wait for many results, beside a bare loop over their streams?

    python -m scripts.bench.results                  4,000 jobs, 400 ended a second
    python -m scripts.bench.results --jobs 1000 --rate 100

The jobs are ended by another process with the worker's own script, in groups of eight, the engine
stubbed. Seconds of CPU are those of the client alone, from after the submission to the last result.
The bare loop reads the streams of results twice a second and makes each `Completion`, and nothing
else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis import Redis
from rich.console import Console
from rich.table import Table

from omlx_producer import AsyncJobHandle, AsyncProducer, Completion, Producer
from omlx_producer.client.outcome import results_key
from omlx_producer.wire import PRIORITIES, queue_name
from omlx_worker.queue.embedded import EmbeddedRedis
from omlx_worker.queue.lease import LeaseTable
from scripts.bench.lease import ALIAS, ending

GROUP = 8
Read = Callable[[str, list[AsyncJobHandle], AsyncProducer], Awaitable[int]]


def end_jobs(url: str, count: int, rate: float) -> None:
    """Be the worker: take and end this many jobs."""
    connection = Redis.from_url(url)
    table = LeaseTable(connection, "bench", [queue_name(ALIAS, level) for level in PRIORITIES])
    began = time.monotonic()
    ended = 0
    while ended < count:
        claimed = table.claim(GROUP)
        if not claimed:
            time.sleep(0.01)
            continue
        ended += len(claimed)
        time.sleep(max(0.0, began + ended / rate - time.monotonic()))
        table.commit([(job, ending(job)) for job in claimed])


async def awaited(_: str, jobs: list[AsyncJobHandle], __: AsyncProducer) -> int:
    results = await asyncio.gather(*(job.result(timeout=120) for job in jobs))
    return len(results)


async def threaded(url: str, jobs: list[AsyncJobHandle], _: AsyncProducer) -> int:
    """`Producer.result` on 32 threads."""
    with Producer(url) as producer, ThreadPoolExecutor(32) as pool:
        results = [pool.submit(producer.result, job.id, 120) for job in jobs]
        return await asyncio.to_thread(lambda: len([each.result() for each in results]))


async def in_turn(url: str, jobs: list[AsyncJobHandle], _: AsyncProducer) -> int:
    def read() -> int:
        with Producer(url) as producer:
            return len([producer.result(job.id, 120) for job in jobs])

    return await asyncio.to_thread(read)


async def bare(url: str, jobs: list[AsyncJobHandle], __: AsyncProducer) -> int:
    left: dict[Any, Any] = {results_key(job.id): "0" for job in jobs}
    with Redis.from_url(url, protocol=2) as connection:
        while left:
            await asyncio.sleep(0.5)
            for key, [(_, fields)] in connection.xread(left):
                del left[key.decode()]
                Completion(json.loads(b64decode(fields[b"return_value"])))
    return len(jobs)


async def measure(url: str, count: int, rate: float, read: Read) -> float:
    """Seconds of CPU to read this many results."""
    with Redis.from_url(url) as connection:
        connection.flushall()
    worker = multiprocessing.get_context("spawn").Process(target=end_jobs, args=(url, count, rate))
    async with AsyncProducer(url) as producer:
        jobs = await producer.submit_many(
            ({"model": ALIAS, "prompt": str(number)} for number in range(count)),
            require_known_model=False,
        )
        worker.start()
        began = time.process_time()
        assert await read(url, jobs, producer) == count
        spent = time.process_time() - began
    worker.join()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=400.0, help="jobs ended a second")
    parser.add_argument("--laps", type=int, default=2)
    options = parser.parse_args()
    table = Table("read by", "CPU seconds", "times the bare loop", title=f"{options.jobs} results")
    ways: dict[str, Read] = {
        "a bare loop": bare,
        "AsyncProducer.result, gathered": awaited,
        "Producer.result on 32 threads": threaded,
        "Producer.result, one after another": in_turn,
    }
    with TemporaryDirectory() as folder, EmbeddedRedis(Path(folder)) as server:
        best = {
            name: min(
                asyncio.run(measure(server.url, options.jobs, options.rate, read))
                for _ in range(options.laps)
            )
            for name, read in ways.items()
        }
    for name, seconds in best.items():
        table.add_row(name, f"{seconds:.2f}", f"{seconds / best['a bare loop']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
