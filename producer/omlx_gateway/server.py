"""The HTTP server: uvicorn, as many connections as the system grants open files."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

MAX_HEADER_BYTES = 64 * 2**10
GRACE_SECONDS = 10
"""For open answers, after the signal to stop."""
OPEN_FILES = 10_240
"""Each connection is one. The most that macOS grants to a process without a hard limit."""


def make_server(app: ASGIApp, **options: Any) -> uvicorn.Server:
    """A server that is ready to run.

    Args:
        options: of `uvicorn.Config`.
    """
    config: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "http": "h11",
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
