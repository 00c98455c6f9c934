"""The HTTP server: uvicorn, as many connections as a share of its open files allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from omlx_gateway.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10
GRACE_SECONDS = 10
"""For open answers, after the signal to stop."""
OPEN_FILES = 10_240
"""The most that macOS grants to a process without a hard limit."""
FILES_PER_CONNECTION = 3
"""Itself, one that is accepted before it can make room, and a file that is sent over it."""


class OneAnswer(H11Protocol):
    """Answers what is no HTTP with a 400, unless the application has begun to answer.

    The break may come in the middle of a body, while the application reads it or afterwards.
    A new connection beyond the limit closes those that have waited longest for a request.
    """

    _waits_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waits_since = self.loop.time()
        most = open_files() // FILES_PER_CONNECTION
        if len(self.connections) > most:
            waiting = [each for each in self.connections if isinstance(each, OneAnswer)]
            waiting = [each for each in waiting if each._waits]
            waiting.sort(key=lambda each: each._waits_since)
            # Many at once, since it takes a while to look at all.
            for each in waiting[: max(1, min(most // 8, len(waiting) - 1))]:
                self.connections.discard(each)
                each.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._waits_since = self.loop.time()

    @property
    def _waits(self) -> bool:
        """Whether no request of this connection is being answered."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = ApiError(400, msg, headers={"Connection": "close"}).response
            head = h11.Response(status_code=400, reason="Bad Request", headers=answer.raw_headers)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


def make_server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """A server that is ready to run.

    Args:
        options: of `uvicorn.Config`.
    """
    config: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "http": OneAnswer,
        "ws": "none",
        # The event loop accepts as many at once, a few times before the first can make room.
        "backlog": min(2048, open_files() // 8),
        "timeout_graceful_shutdown": GRACE_SECONDS,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
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
        listening = socket.create_server(address, family=family)
        # Its connections inherit it. A client whose machine is gone would else hold its body here.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        yield listening


def allow_open_files() -> None:
    """Raise the soft limit of open files to `OPEN_FILES`, or as far as the hard one allows."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if open_files() < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_files() -> int:
    """How many files this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
