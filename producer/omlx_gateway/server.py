"""The HTTP server: uvicorn with h11. It makes room for new connections, and ends unread ones."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from omlx_gateway.errors import RETRY_SECONDS, ApiError
from omlx_gateway.limits import Limits

MAX_HEADER_BYTES = 64 * 2**10
GRACE_SECONDS = 10
"""For open answers, after the signal to stop."""


def make_server(app: ASGIApp, limits: Limits, **options: Any) -> uvicorn.Server:
    """A server that is ready to run.

    Args:
        options: of `uvicorn.Config`.
    """
    config: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "ws": "none",
        "timeout_graceful_shutdown": GRACE_SECONDS,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
        "http": _protocol(limits),
    }
    # It quotes bytes of uploads that it cannot read.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    return uvicorn.Server(uvicorn.Config(app, **(config | options)))


def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A socket for each address of a host, which listens there.

    Raises, while iterating:
        OSError: if one is taken or not this machine's, or the host has none.
    """
    for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        yield socket.create_server(address, family=family)


def _protocol(limits: Limits) -> type[H11Protocol]:
    """The protocol of a connection, which has a time for a reader who is away.

    A new connection beyond the limit closes the one that is idle for the longest time. If none is
    idle, its request is refused. Own errors have OpenAI's form: this one, and what is no HTTP.
    """
    patience = limits.patience

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(
            503,
            f"{limits.connections} connections are open; try again in {RETRY_SECONDS} s",
            "server_error",
            "too_many_connections",
            headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"},
        )
        await error.response(scope, receive, send)

    class PatientProtocol(H11Protocol):
        _idle_since = 0.0
        _reader_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._idle_since = self.loop.time()
            if len(self.connections) > limits.connections:
                others = [each for each in self.connections if isinstance(each, PatientProtocol)]
                idle = [each for each in others if each is not self and each._idle]
                if idle:
                    min(idle, key=lambda each: each._idle_since).transport.abort()

        def data_received(self, data: bytes) -> None:
            full = len(self.connections) > limits.connections
            self.app = refuse if full else self.config.loaded_app
            super().data_received(data)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._idle_since = self.loop.time()

        @property
        def _idle(self) -> bool:
            """Whether no request waits for its answer."""
            answered = self.cycle is None or self.cycle.response_complete
            return answered and not self.transport.is_closing()

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (uvicorn's)
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                answer = ApiError(
                    400,
                    "the request is not HTTP, or its headers are longer than "
                    f"{MAX_HEADER_BYTES} bytes; send HTTP/1.1",
                    headers={"Connection": "close"},
                ).response
                for event in (
                    h11.Response(status_code=400, headers=answer.raw_headers),
                    h11.Data(data=bytes(answer.body)),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                # Its application may still be at work, and has nobody to answer.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self.resume_writing()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader_due = self.loop.call_later(patience, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reader_due is not None:
                self._reader_due.cancel()
                self._reader_due = None

    return PatientProtocol
