"""What the routes share: the producer, the limits, and what a request's headers ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
from redis import Redis
from starlette.requests import Request

from omlx_gateway.contents import Contents, FolderContents, RedisContents
from omlx_gateway.errors import ApiError
from omlx_gateway.limits import Limits
from omlx_producer import AsyncJobHandle, AsyncProducer
from omlx_producer.client.waiting import queue_key
from omlx_producer.connection import connect, connect_async
from omlx_producer.errors import UnknownJob
from omlx_producer.wire import PRIORITIES, Priority


@dataclass
class Gateway:
    """One gateway while it runs; ``request.app.state.gateway``.

    Attributes:
        blocking: a client for what runs on threads.
        contents: the bytes of uploads.
    """

    producer: AsyncProducer
    redis: redis.asyncio.Redis
    blocking: Redis
    contents: Contents
    limits: Limits = field(default_factory=Limits)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @classmethod
    def connect(cls, url: str, files_dir: Path | None, limits: Limits) -> Gateway:
        """A gateway with its own connections to Redis."""
        blocking = connect(url, socket_timeout=5)
        contents = FolderContents(files_dir) if files_dir else RedisContents(blocking)
        return cls(AsyncProducer(url), connect_async(url), blocking, contents, limits)

    @classmethod
    def of(cls, request: Request) -> Gateway:
        gateway: Gateway = request.app.state.gateway
        return gateway

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that a client who has gone has left to do."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        await self.producer.close()
        await self.redis.aclose()
        self.blocking.close()

    async def require_room(self, model: Any) -> None:
        """Refuse a request while too many jobs wait for its model.

        Raises:
            ApiError: 429.
        """
        # No other name is a model's, and the request is refused for it.
        if not (isinstance(model, str) and model.isascii()):
            return
        pipe = self.redis.pipeline(transaction=False)
        for priority in PRIORITIES:
            pipe.llen(queue_key(model, priority))
        waiting = sum(await pipe.execute())
        if waiting >= self.limits.queued:
            raise ApiError(
                429,
                f"{waiting} jobs wait for {model!r:.200}, and this gateway takes more below "
                f"{self.limits.queued}; try again later",
                "rate_limit_error",
                "queue_full",
                headers={"Retry-After": "10"},
            )

    async def read_body(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request's body.

        Raises:
            ApiError: 413 if it is too long, 400 if it is no JSON object, 415 if it is not called
                one: browsers let pages of other sites send what is not.
        """
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, f"Content-Type: got {kind!r:.80}; give application/json")
        found = bytearray()
        async for part in request.stream():
            found += part
            if len(found) > self.limits.body_bytes:
                raise ApiError(
                    413,
                    f"the body is longer than {self.limits.body_bytes} bytes; shorten it",
                    headers={"Connection": "close"},
                )
        try:
            body = json.loads(found)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON; give a JSON object") from None
        if not isinstance(body, dict):
            raise ApiError(400, "the body is not a JSON object; give one")
        return body


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
