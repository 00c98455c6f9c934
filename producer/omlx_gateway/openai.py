"""OpenAI's own client without a server: it runs a gateway in its own process.

So everything that takes an OpenAI client submits to the queue. The gateway is a thread, reached
over a socket in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import threading
import weakref
from typing import Any

import httpx2
import openai

from omlx_gateway.app import create_app
from omlx_gateway.contents import RedisContents
from omlx_gateway.files import FileStore
from omlx_gateway.intake import Intake
from omlx_gateway.limits import Limits
from omlx_gateway.server import make_server
from omlx_producer.connection import connect, redis_url

BASE_URL = "http://localhost/v1"
# A program may do as much as it likes between two parts of a stream.
_LIMITS = Limits(patience=24 * 3600.0)


class OpenAI(openai.OpenAI):
    """OpenAI's client, onto the queue.

    Close it, or use it in a ``with`` statement: a process that ends before leaves the jobs of its
    open streams to run, and the rows of a batch that it has just made to the next gateway.

    Args:
        url: where Redis is; by default where the environment says.
        options: of OpenAI's client.

    Raises:
        InvalidRequest: if it is not the URL of a Redis server.

    >>> with OpenAI() as client:
    ...     stream = client.completions.create(model="fake", prompt="def f(x):", stream=True)
    ...     text = "".join(chunk.choices[0].text for chunk in stream)
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        # `with_options` passes that of the client that it copies.
        if options.get("http_client") is None:
            options["http_client"] = httpx2.Client(transport=_Transport(_OwnGateway(url)))
        super().__init__(**{"api_key": "none", "base_url": BASE_URL} | options)


class AsyncOpenAI(openai.AsyncOpenAI):
    """The form of `OpenAI` for asyncio.

    >>> async def main() -> str | None:
    ...     async with AsyncOpenAI() as client:
    ...         chat = [{"role": "user", "content": "Reverse a list."}]
    ...         answer = await client.chat.completions.create(model="fake", messages=chat)
    ...         return answer.choices[0].message.content
    >>> asyncio.run(main())
    '...'
    """

    def __init__(self, url: str | None = None, **options: Any) -> None:
        if options.get("http_client") is None:
            transport = _AsyncTransport(_OwnGateway(url))
            options["http_client"] = httpx2.AsyncClient(transport=transport)
        super().__init__(**{"api_key": "none", "base_url": BASE_URL} | options)


class _OwnGateway:
    """A gateway on a thread that ends with the process, or when it is told to.

    Attributes:
        path: of its socket.
    """

    def __init__(self, url: str | None) -> None:
        self._url = redis_url(url)
        self._server = make_server(
            create_app(self._url, _LIMITS), _LIMITS, log_config=None, log_level=None
        )
        folder = tempfile.mkdtemp(prefix="omlx-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder)
        self.path = f"{folder}/socket"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        # So a client may connect before the thread accepts.
        self._socket.listen(_LIMITS.connections)
        # Threads that it starts are daemons too, so the end of the process waits for none.
        self._thread = threading.Thread(target=self._run, name="omlx-gateway", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the thread end soon."""
        self._server.should_exit = True

    def stop(self) -> None:
        self.end()
        self._thread.join()

    def _run(self) -> None:
        with self._socket:
            self._server.run([self._socket])
        self._remove()
        # A batch that was made last has its rows in the queue before the client is closed.
        with connect(self._url, socket_timeout=5) as connection:
            Intake(connection, FileStore(connection, RedisContents(connection))).look()


class _Transport(httpx2.HTTPTransport):
    def __init__(self, gateway: _OwnGateway) -> None:
        super().__init__(verify=False, uds=gateway.path, limits=openai.DEFAULT_CONNECTION_LIMITS)
        self._gateway = gateway
        weakref.finalize(self, gateway.end)

    def close(self) -> None:
        super().close()
        self._gateway.stop()


class _AsyncTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, gateway: _OwnGateway) -> None:
        super().__init__(verify=False, uds=gateway.path, limits=openai.DEFAULT_CONNECTION_LIMITS)
        self._gateway = gateway
        weakref.finalize(self, gateway.end)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self._gateway.stop)
