"""The Python API for asyncio: `Producer`'s methods, awaited."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self, Unpack

from omlx_producer.client.cancel import CancelOutcome
from omlx_producer.client.fields import SubmitArguments, SubmitManyArguments
from omlx_producer.client.models import Fields
from omlx_producer.client.outcome import JobState
from omlx_producer.client.reader import AsyncTokenStream, end_reading, wait_for_end_async
from omlx_producer.client.stream import RECONNECT_SECONDS, FirstText
from omlx_producer.connection import connect_async, redis_url
from omlx_producer.producer import JobHandle, Producer
from omlx_producer.wire import Completion, ModelInfo, Priority, embedding_requests


@dataclass(frozen=True, slots=True)
class AsyncJobHandle:
    """A submitted job; see `JobHandle`.

    >>> async def main() -> str:
    ...     async with AsyncProducer() as producer:
    ...         job: AsyncJobHandle = await producer.submit(prompt="def f(x):")
    ...         return (await job.result(timeout=60)).text
    >>> asyncio.run(main())
    '...'
    """

    id: str
    queue: str
    producer: AsyncProducer = field(repr=False, compare=False)

    def stream(self, cursor: int = 0) -> AsyncTokenStream:
        """See `Producer.stream`."""
        return self.producer.stream(self.id, cursor)

    async def text(self) -> AsyncIterator[str]:
        """See `JobHandle.text`."""
        text = FirstText()
        async with self.stream() as events:
            async for event in events:
                if piece := text.take(event):
                    yield piece
        if rest := text.rest(await self.result()):
            yield rest

    async def result(self, timeout: float | None = None) -> Completion:
        """See `Producer.result`."""
        return await self.producer.result(self.id, timeout)

    async def state(self) -> JobState:
        """See `Producer.status`."""
        return await self.producer.status(self.id)

    async def cancel(self) -> CancelOutcome:
        """See `Producer.cancel`."""
        return await self.producer.cancel(self.id)


class AsyncProducer:
    """A client of the queue for one event loop.

    Results share a connection, and a stream has one of its own. The other methods run `Producer`'s
    on a thread. If the task that awaits one of them is cancelled, the call still goes on to its
    end. Bulk work is `Producer`'s alone; it takes a thread, as in
    ``await asyncio.to_thread(producer.run, rows, "out.jsonl")``.

    Args:
        url: where Redis is; by default where the environment says.
        allow_eviction: see `Producer`.

    >>> async def main() -> None:
    ...     async with AsyncProducer() as producer:
    ...         jobs = await producer.submit_many([{"prompt": "def f(x):"}, {"prompt": "class A:"}])
    ...         print(sorted({event.type async for event in jobs[0].stream()}))
    ...         results = await asyncio.gather(*(job.result() for job in jobs))
    ...         print(len(results))
    >>> asyncio.run(main())
    ['done', 'tokens']
    2
    """

    def __init__(self, url: str | None = None, *, allow_eviction: bool | None = None) -> None:
        url = redis_url(url)
        self._connection = connect_async(url)
        self._producer = Producer(url, allow_eviction=allow_eviction)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all streams and waits, and close the connections."""
        end_reading(self._connection)
        await self._connection.aclose()
        self._producer.close()

    async def submit(
        self, request: Fields | None = None, **arguments: Unpack[SubmitArguments]
    ) -> AsyncJobHandle:
        """See `Producer.submit`."""
        return self._handle(await asyncio.to_thread(self._producer.submit, request, **arguments))

    async def submit_many(
        self, requests: Iterable[Fields], **arguments: Unpack[SubmitManyArguments]
    ) -> list[AsyncJobHandle]:
        """See `Producer.submit_many`."""
        jobs = await asyncio.to_thread(self._producer.submit_many, requests, **arguments)
        return [self._handle(job) for job in jobs]

    async def embed(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        priority: Priority = "default",
        timeout: float | None = None,
    ) -> list[array[float]]:
        """See `Producer.embed`."""
        requests = embedding_requests(texts, model, dimensions)
        jobs = await self.submit_many(requests, priority=priority)
        results = await asyncio.gather(*(job.result(timeout) for job in jobs))
        return [vector for result in results for vector in result.vectors]

    def stream(
        self, job_id: str, cursor: int = 0, *, reconnect_for: float = RECONNECT_SECONDS
    ) -> AsyncTokenStream:
        """See `Producer.stream`."""
        return AsyncTokenStream(self._connection, job_id, cursor, reconnect_for=reconnect_for)

    async def result(self, job_id: str, timeout: float | None = None) -> Completion:
        """See `Producer.result`."""
        return await wait_for_end_async(self._connection, job_id, timeout)

    async def status(self, job_id: str) -> JobState:
        """See `Producer.status`."""
        return await asyncio.to_thread(self._producer.status, job_id)

    async def cancel(self, job_id: str) -> CancelOutcome:
        """See `Producer.cancel`."""
        return await asyncio.to_thread(self._producer.cancel, job_id)

    async def require_suitable(self) -> None:
        """See `Producer.require_suitable`."""
        await asyncio.to_thread(self._producer.require_suitable)

    async def models(self, *, live: bool = False) -> dict[str, ModelInfo]:
        """See `Producer.models`."""
        return await asyncio.to_thread(self._producer.models, live=live)

    def _handle(self, job: JobHandle) -> AsyncJobHandle:
        return AsyncJobHandle(job.id, job.queue, self)
