"""The HTTP server: uvicorn, as many connections as the system grants open files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Iterator
from http import HTTPStatus
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from omlx_gateway.errors import ApiError

MAX_HEADER_BYTES = 64 * 2**10
GRACE_SECONDS = 5
"""For open answers, after the signal to stop."""
CLOSING_SECONDS = 2
"""For those that have not ended then: to say so, and to cancel their jobs."""
OPEN_FILES = 10_240
"""The most that macOS grants to a process without a hard limit."""
ACCEPTED_AT_ONCE = 32
"""By asyncio, before it calls a protocol. If there are no files left it logs each as an error."""
WAITING_CONNECTIONS = 2048
SPARE_FILES = 4 * ACCEPTED_AT_ONCE + 72
"""For connections that are accepted and not refused yet, for uploads, and for Redis."""
REMINDER_SECONDS = 60.0

_RAISE = "the limit of open files (ulimit -n) allows no more; raise it, or close some"

log = logging.getLogger("omlx_gateway")


class OneAnswer(H11Protocol):
    """Answers what is no HTTP with a 400, unless the application has begun to answer.

    The break may come in the middle of a body, while the application reads it or afterwards.
    A connection for which files may be missing is answered with a 503.
    """

    _told_at: ClassVar = -REMINDER_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (others := len(self.connections) - 1) < most_connections():
            return
        if (now := time.monotonic()) - OneAnswer._told_at >= REMINDER_SECONDS:
            OneAnswer._told_at = now
            log.warning("%d connections are open, and %s; others get a 503", others, _RAISE)
        told = f"this gateway has {others} connections, and {_RAISE}; try again later"
        self._refuse(ApiError(503, told, "server_error", "too_many_connections"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error.headers["Connection"] = "close"
            answer, reason = error.response, HTTPStatus(error.status).phrase
            head = h11.Response(status_code=error.status, reason=reason, headers=answer.raw_headers)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class Server(uvicorn.Server):
    """Accepts few connections at once, and lets many wait for it.

    However often it is told to stop, open answers have until `CLOSING_SECONDS` before the end of
    ``timeout_graceful_shutdown``.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            # The server's backlog is both.
            each.listen(WAITING_CONNECTIONS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn cancels them at its timeout, and then waits for none of them.
        grace = (self.config.timeout_graceful_shutdown or 0) - CLOSING_SECONDS
        asyncio.get_running_loop().call_later(grace, self._cancel_answers)
        await super().shutdown(sockets)

    def _cancel_answers(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # At its end uvicorn raises all signals again, and asyncio answers a second Ctrl-C with a
        # traceback.
        if not self.should_exit:
            super().handle_exit(sig, frame)


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
        "backlog": ACCEPTED_AT_ONCE,
        "timeout_graceful_shutdown": GRACE_SECONDS + CLOSING_SECONDS,
        "h11_max_incomplete_event_size": MAX_HEADER_BYTES,
    }
    # It quotes bytes of uploads that it cannot read.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    return Server(uvicorn.Config(app, **(config | options)))


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


def most_connections() -> int:
    """How many the limit of open files allows: one for each, and one for what it asks Redis."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = OPEN_FILES if soft == resource.RLIM_INFINITY else soft
    return max(1, (soft - SPARE_FILES) // 2)


def allow_open_files() -> None:
    """Raise the soft limit of open files to `OPEN_FILES`, or as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
