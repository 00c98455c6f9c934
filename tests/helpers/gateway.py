"""Gateways of this machine: on a thread of the test, or as a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

import httpx2
from starlette.types import ASGIApp

from omlx_gateway.app import create_app
from omlx_gateway.keys import KeyFile
from omlx_gateway.limits import Limits
from omlx_gateway.server import CLOSING_SECONDS, make_server
from tests.helpers.workers import wait_for


@contextlib.contextmanager
def running_gateway(
    redis_url: str,
    limits: Limits | None = None,
    app: ASGIApp | None = None,
    keys: KeyFile | None = None,
    hosts: Sequence[str] = (),
) -> Iterator[str]:
    """The gateway's URL; it ends with the block.

    Args:
        app: the application, if not the usual one.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = make_server(
        app or create_app(redis_url, limits, keys, hosts),
        log_level="warning",
        timeout_graceful_shutdown=1 + CLOSING_SECONDS,
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive())
        assert thread.is_alive()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()
    assert not thread.is_alive()


@contextlib.contextmanager
def gateway_process(
    url: str,
    port: int,
    *options: str,
    stderr: IO[bytes] | None = None,
    files: int | None = None,
    most_files: int | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A gateway as a process of its own, killed when the block ends.

    Args:
        files: that it may open, until it allows itself more.
        most_files: that it may allow itself.
    """
    code = "from omlx_gateway.cli import main; main()"
    if files is not None:
        hard = most_files or "resource.getrlimit(resource.RLIMIT_NOFILE)[1]"
        limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {hard}))"
        code = f"import resource; {limit}; {code}"
    arguments = ["--port", str(port), "--redis-url", url, *options]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=stderr,
    )
    try:
        wait_for(lambda: is_healthy(port, process))
        yield process
    finally:
        process.kill()
        process.wait(10)


def is_healthy(port: int, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the gateway has ended"
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx2.HTTPError:
        return False


def error_of(answer: httpx2.Response) -> dict[str, Any]:
    """The error of an answer, which must have OpenAI's form and nothing else."""
    assert answer.is_error, answer.text
    assert answer.headers["content-type"] == "application/json"
    body: dict[str, Any] = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error
