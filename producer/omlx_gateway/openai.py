"""OpenAI's own client without a server: the gateway's application runs in the caller's process.

Everything that takes an OpenAI client then goes straight onto the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import httpx2
import openai
from starlette.applications import Starlette
from starlette.types import Message

from omlx_gateway.app import create_app

BASE_URL = "http://omlx-queue/v1"
# Messages of an answer that its reader has yet to take.
AHEAD = 64


class AsyncOpenAI(openai.AsyncOpenAI):
    """OpenAI's client for asyncio, onto the queue.

    Args:
        redis_url: by default where the environment says.
        options: of OpenAI's client.

    >>> async def main() -> str | None:
    ...     async with AsyncOpenAI() as client:
    ...         chat = [{"role": "user", "content": "Reverse a list."}]
    ...         answer = await client.chat.completions.create(model="fake", messages=chat)
    ...         return answer.choices[0].message.content
    >>> asyncio.run(main())
    '...'
    """

    def __init__(self, redis_url: str | None = None, **options: Any) -> None:
        transport = AppTransport(create_app(redis_url))
        client = httpx2.AsyncClient(transport=transport)
        super().__init__(api_key="none", base_url=BASE_URL, http_client=client, **options)


class OpenAI(openai.OpenAI):
    """OpenAI's client, onto the queue; see `AsyncOpenAI`. Any number of threads may use one.

    >>> with OpenAI() as client:
    ...     stream = client.completions.create(model="fake", prompt="def f(x):", stream=True)
    ...     text = "".join(chunk.choices[0].text for chunk in stream)
    """

    def __init__(self, redis_url: str | None = None, **options: Any) -> None:
        client = httpx2.Client(transport=ThreadTransport(create_app(redis_url)))
        super().__init__(api_key="none", base_url=BASE_URL, http_client=client, **options)


class AppTransport(httpx2.AsyncBaseTransport):
    """Sends requests to an application of this process, and streams its answers."""

    def __init__(self, app: Starlette) -> None:
        self._app = app
        self._lifespan = contextlib.AsyncExitStack()
        self._starting = asyncio.Lock()
        self._started = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        async with self._starting:
            if not self._started:
                lifespan = self._app.router.lifespan_context(self._app)
                await self._lifespan.enter_async_context(lifespan)
                self._started = True
        answer = _Answer(self._app, request, await request.aread())
        start = await answer.next()
        assert start is not None
        return httpx2.Response(start["status"], headers=start["headers"], stream=answer)

    async def aclose(self) -> None:
        await self._lifespan.aclose()


class _Answer(httpx2.AsyncByteStream):
    """An answer as the application writes it; the application is told when its reader goes."""

    def __init__(self, app: Starlette, request: httpx2.Request, body: bytes) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(AHEAD)
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
        }
        self._task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: Starlette, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            await self._send(None)

    async def _receive(self) -> Message:
        if (body := self._body) is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message | None) -> None:
        if not self._gone.is_set():
            await self._messages.put(message)

    async def next(self) -> Message | None:
        """The next message; None at the end.

        Raises:
            Exception: what the application raised.
        """
        message = await self._messages.get()
        if message is None:
            await self._task
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.next()) is not None:
            if body := message.get("body"):
                yield body
            if not message.get("more_body"):
                return

    async def aclose(self) -> None:
        self._gone.set()
        while not self._task.done():
            # It may wait for room.
            while not self._messages.empty():
                self._messages.get_nowait()
            await asyncio.wait({self._task}, timeout=0.05)


class ThreadTransport(httpx2.BaseTransport):
    """The form of `AppTransport` without asyncio: an event loop on a thread of its own."""

    def __init__(self, app: Starlette) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._inner = self._call(_made(app))

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        request.read()
        sent = httpx2.Request(
            request.method, request.url, headers=request.headers, content=request.content
        )
        answer = self._call(self._inner.handle_async_request(sent))
        stream = _ThreadStream(self._call, answer.stream)
        return httpx2.Response(answer.status_code, headers=answer.headers, stream=stream)

    def close(self) -> None:
        self._call(self._inner.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _made(app: Starlette) -> AppTransport:
    return AppTransport(app)


class _ThreadStream(httpx2.SyncByteStream):
    def __init__(self, call: Any, answer: Any) -> None:
        self._call = call
        self._answer = answer
        self._parts = answer.__aiter__()

    def __iter__(self) -> Iterator[bytes]:
        while (part := self._call(anext(self._parts, None))) is not None:
            yield part

    def close(self) -> None:
        self._call(self._answer.aclose())
