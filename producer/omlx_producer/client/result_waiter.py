"""Awaits the results of any number of jobs over one connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import redis.asyncio

from omlx_producer.client.enqueue import CHUNK
from omlx_producer.client.outcome import (
    Outcome,
    ask_result,
    find_outcome,
    require_job_id,
    results_key,
    timed_out,
)
from omlx_producer.connection import block_seconds
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import Reconnection, broken

# A wait looks at its job once, however short its timeout is, unless the server hangs.
FIRST_LOOK_SECONDS = 1.0


@dataclass(eq=False, slots=True)
class _Wait:
    ended: asyncio.Future[Outcome]
    looked: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, ending: Outcome | BaseException) -> None:
        self.looked.set()
        if self.ended.done():
            return
        if isinstance(ending, Outcome):
            self.ended.set_result(ending)
        else:
            self.ended.set_exception(ending)


class ResultWaiter:
    """One task that serves all waits of an event loop. It ends with the last of them.

    It looks at a job when a wait for it begins, and when its results change. Every few seconds it
    looks at all of them, because other tools cancel jobs without a result.
    """

    def __init__(self, connection: redis.asyncio.Redis) -> None:
        self._connection = connection
        self._waits: dict[str, list[_Wait]] = {}
        # By job: the last entry of its results, as of the last look.
        self._seen: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None
        self._interruption: asyncio.Future[Any] | None = None

    async def outcome(self, job_id: str, timeout: float | None) -> Outcome:
        """Wait for the end of a job; see `Producer.result` for the errors."""
        require_job_id(job_id)
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        look_by = None if deadline is None else max(deadline, loop.time() + FIRST_LOOK_SECONDS)
        wait = _Wait(loop.create_future())
        self._waits.setdefault(job_id, []).append(wait)
        self._seen.pop(job_id, None)
        self._interrupt()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
            self._task.add_done_callback(self._fail_rest)
        try:
            async with asyncio.timeout_at(look_by):
                await wait.looked.wait()
            async with asyncio.timeout_at(deadline):
                return await wait.ended
        except TimeoutError:
            raise timed_out(job_id, timeout) from None
        finally:
            self._leave(job_id, wait)

    async def close(self) -> None:
        """End the task. Waits that are left raise an OmlxQueueError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _leave(self, job_id: str, wait: _Wait) -> None:
        waits = self._waits.get(job_id, [])
        if wait in waits:
            waits.remove(wait)
        if not waits:
            self._waits.pop(job_id, None)
        if not self._waits:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._interruption is not None and not self._interruption.done():
            self._interruption.set_result(None)

    def _fail_rest(self, task: asyncio.Task[None]) -> None:
        closed = OmlxQueueError("the producer was closed while it waited for a result")
        error = closed if task.cancelled() else task.exception()
        if error is not None:
            for job_id in list(self._waits):
                self._end(job_id, error)

    def _end(self, job_id: str, ending: Outcome | BaseException) -> None:
        for wait in self._waits.pop(job_id, []):
            wait.end(ending)

    async def _serve(self) -> None:
        look_at_all, outage = 0.0, Reconnection()
        while self._waits:
            if time.monotonic() >= look_at_all:
                self._seen.clear()
                look_at_all = time.monotonic() + block_seconds(self._connection)
            try:
                if unseen := [job_id for job_id in self._waits if job_id not in self._seen]:
                    await self._look(unseen)
                else:
                    await self._listen(look_at_all - time.monotonic())
                outage.answered()
            except redis.RedisError as error:
                pause = outage.failed(error)
                # Waits that begin now time out as others do.
                for wait in chain.from_iterable(self._waits.values()):
                    wait.looked.set()
                await asyncio.sleep(pause)

    async def _look(self, job_ids: Sequence[str]) -> None:
        """End the waits for jobs that are over, and note the others as seen."""
        for start in range(0, len(job_ids), CHUNK):
            chunk = job_ids[start : start + CHUNK]
            pipe = self._connection.pipeline()
            for job_id in chunk:
                ask_result(pipe, job_id)
            replies = await pipe.execute(raise_on_error=False)
            for job_id, status, entries in zip(chunk, replies[::2], replies[1::2], strict=True):
                try:
                    outcome = find_outcome(job_id, status, entries)
                except OmlxQueueError as error:
                    self._end(job_id, error)
                    continue
                if outcome is not None:
                    self._end(job_id, outcome)
                    continue
                self._seen[job_id] = entries[0][0] if entries else b"0-0"
                for wait in self._waits.get(job_id, ()):
                    wait.looked.set()

    async def _listen(self, seconds: float) -> None:
        """Wait for a result of any job, or for an interruption; that job is then unseen."""
        jobs = {results_key(job_id).encode(): job_id for job_id in self._waits}
        after: dict[Any, Any] = {key: self._seen[job_id] for key, job_id in jobs.items()}
        block = max(1, int(1000 * seconds))
        read: asyncio.Future[Any] = asyncio.ensure_future(
            self._connection.xread(after, block=block)
        )
        interruption: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._interruption = interruption
        try:
            await asyncio.wait({read, interruption}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # redis-py closes a connection whose read is cancelled.
            read.cancel()
            await asyncio.wait({read})
        if read.cancelled():
            return
        if broken(read.exception()):
            # The error does not name the key. A look at all jobs does.
            self._seen.clear()
            return
        for key in dict(read.result()):
            self._seen.pop(jobs[key], None)
