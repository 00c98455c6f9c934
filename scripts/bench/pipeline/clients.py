"""The clients of one lap: one process, an asyncio task with a subscription of its own a job.

Their connections are open before the clock starts, as in a long-running program.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress

from redis.asyncio import Redis

from omlx_producer import Producer
from omlx_producer.client.reader import AsyncTokenStream
from omlx_producer.producer import JobHandle
from omlx_producer.wire import GenerationRequest, TokensEvent
from scripts.bench.pipeline.lap import CpuClock, Lap, Watched

SLOW_SECONDS = 0.25
"""The slow consumer sleeps this long after each event; a step takes far less."""


class WorkerSide:
    """Jobs through Redis to the worker's process and their tokens back to this one.

    Args:
        processes: ids of the ``worker`` and of ``redis``.
    """

    name = "worker"

    def __init__(
        self, producer: Producer, url: str, priority: str = "default", **processes: int
    ) -> None:
        self._producer = producer
        self._priority = priority
        self._url = url
        self._processes = {"worker": processes["worker"], "redis": processes["redis"]}

    def lap(self, requests: Sequence[GenerationRequest], *, slow: bool = False) -> Lap:
        """All jobs at once, read to their ends.

        Args:
            slow: the first job's consumer is slow; what it sees is left out.
        """
        return asyncio.run(self._lap(requests, slow))

    async def _lap(self, requests: Sequence[GenerationRequest], slow: bool) -> Lap:
        # A subscription and a stream reader each: more than the default pool allows.
        connections = 2 * len(requests)
        async with Redis.from_url(self._url, max_connections=connections + 1) as connection:
            await asyncio.gather(*(connection.ping() for _ in range(connections)))
            return await self._timed(connection, requests, slow)

    async def _timed(
        self, connection: Redis, requests: Sequence[GenerationRequest], slow: bool
    ) -> Lap:
        cpu = CpuClock(**self._processes, clients=os.getpid())
        began = time.perf_counter()
        jobs = self._producer.submit_many(requests, priority=self._priority)
        dawdler = asyncio.create_task(_dawdle(connection, jobs[0])) if slow else None
        followed = jobs[1:] if slow else jobs
        watched = await asyncio.gather(*(_follow(connection, job, began) for job in followed))
        computed, unwatched = cpu.stop(), 0
        if dawdler:
            dawdler.cancel()
            with suppress(asyncio.CancelledError):
                await dawdler
            # Its row is as long as the others'; the next lap must find the worker idle.
            unwatched = jobs[0].result(timeout=60)["usage"]["completion_tokens"]
        return Lap.of(watched, computed, unwatched)


async def _follow(connection: Redis, job: JobHandle, began: float) -> Watched:
    watched = Watched()
    async with AsyncTokenStream(connection, job.id) as events:
        async for event in events:
            now = time.perf_counter() - began
            if isinstance(event, TokensEvent):
                tokens = sum(len(choice.tokens) for choice in event.choices)
                watched.tokens += tokens
                if tokens:
                    watched.arrivals.append(now)
            elif event.end.ok:
                watched.ended = now
            else:
                raise RuntimeError(f"job {job.id}: {event}")
    return watched


async def _dawdle(connection: Redis, job: JobHandle) -> None:
    async with AsyncTokenStream(connection, job.id) as events:
        async for _ in events:
            await asyncio.sleep(SLOW_SECONDS)
