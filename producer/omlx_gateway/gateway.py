"""What the routes share: the producer, the limits, and what a request's headers ask for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis import Redis
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request

from omlx_gateway.errors import RETRY_SECONDS, ApiError
from omlx_gateway.limits import SMALL_BODY_BYTES, Limits
from omlx_producer import AsyncJobHandle, AsyncProducer
from omlx_producer.connection import connect, connect_async
from omlx_producer.errors import InvalidRequest, UnknownJob
from omlx_producer.wire import PRIORITIES, Priority
from omlx_producer.wire.json_limits import read_json, require_few_values

UPLOADS_AT_ONCE = 4


@dataclass
class Gateway:
    """One gateway while it runs; ``request.app.state.gateway``.

    Attributes:
        blocking: a client for what runs on threads.
        uploads: the right to check and upload the input of a batch, which keeps a thread busy.
    """

    producer: AsyncProducer
    redis: redis.asyncio.Redis
    blocking: Redis
    limits: Limits = field(default_factory=Limits)
    uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(UPLOADS_AT_ONCE))
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _held_bytes: int = 0

    @classmethod
    def connect(cls, url: str, limits: Limits) -> Gateway:
        """A gateway with its own connections to Redis."""
        blocking = connect(url, socket_timeout=5)
        return cls(AsyncProducer(url), connect_async(url), blocking, limits)

    @classmethod
    def of(cls, request: Request) -> Gateway:
        gateway: Gateway = request.app.state.gateway
        return gateway

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what must be done although the client has gone."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        await self.producer.close()
        await self.redis.aclose()
        self.blocking.close()

    @contextlib.asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object of a request's body. Its bytes count as held until the block ends.

        Raises:
            ApiError: 413 if it is too long; 400 if it is no JSON object; 415 if its Content-Type is
                another, which browsers let pages of other sites send; 503 if too much is held.
            InvalidRequest: if it holds too many values.
        """
        if not is_json(request.headers):
            kind = request.headers.get("content-type", "")
            raise ApiError(415, f"Content-Type: got {kind!r:.80}; give application/json")
        found, held = bytearray(), 0
        try:
            async for part in request.stream():
                found += part
                if len(found) > self.limits.body_bytes:
                    raise ApiError(
                        413,
                        f"the body is longer than {self.limits.body_bytes} bytes; shorten it",
                        headers={"Connection": "close"},
                    )
                more = max(0, len(found) - SMALL_BODY_BYTES) - held
                self._hold(more)
                held += more
            yield await run_in_threadpool(_parse, found) if held else _parse(found)
        finally:
            self._held_bytes -= held

    def _hold(self, more: int) -> None:
        """Count more bytes of a body.

        Raises:
            ApiError: 503.
        """
        if more and self._held_bytes + more > self.limits.held_bytes:
            raise ApiError(
                503,
                f"this gateway holds {self._held_bytes} bytes of long requests; "
                f"try again in {RETRY_SECONDS} s",
                "server_error",
                "too_many_bodies",
                headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
            )
        self._held_bytes += more


def _parse(found: bytearray) -> dict[str, Any]:
    """The object of a body, which is emptied."""
    try:
        text = found.decode("utf-8-sig")
        found.clear()
        body = read_json(text)
    except InvalidRequest:
        raise
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON; give a JSON object") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object; give one")
    require_few_values(body)
    return body


def is_json(headers: Headers) -> bool:
    """Whether the Content-Type of a body is that of JSON."""
    kind = headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower() == "application/json"


async def cancel(job: AsyncJobHandle) -> None:
    """Cancel a job whose client has gone."""
    # Redis is away: the job runs to its end. Unknown: it is over.
    with contextlib.suppress(UnknownJob, redis.RedisError):
        await job.cancel()


def read_priority(request: Request) -> Priority | None:
    """The priority that ``X-Omlx-Priority`` names; None without it."""
    given = request.headers.get("x-omlx-priority")
    if given is None:
        return None
    for priority in PRIORITIES:
        if given == priority:
            return priority
    raise ApiError(400, f"X-Omlx-Priority: got {given!r:.60}; give {', '.join(PRIORITIES)}")
