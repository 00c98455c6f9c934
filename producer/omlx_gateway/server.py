"""The HTTP server: uvicorn, as many connections as the system grants open files."""

from __future__ import annotations

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
"""Each connection is one. The most that macOS grants to a process without a hard limit."""


class OneAnswer(H11Protocol):
    """Answers what is no HTTP with a 400, unless the application has begun to answer.

    The break may come in the middle of a body, while the application reads it or afterwards.
    """

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
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
