"""A gateway does not wait for clients that neither send nor read."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
from redis import Redis

from omlx_gateway.limits import Limits
from omlx_worker.queue.embedded import free_port
from tests.helpers.fake_worker import announce
from tests.helpers.gateway import error_of, gateway_process, running_gateway
from tests.helpers.workers import (
    ALIAS,
    fetch,
    is_over,
    queue,
    running_worker,
    started,
    status,
    wait_for,
)

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
def impatient(redis_url: str) -> Iterator[tuple[str, int]]:
    """The address of a gateway that waits for half a second."""
    with running_gateway(redis_url, Limits(patience=0.5)) as url:
        yield "127.0.0.1", int(url.rpartition(":")[2])


def read_to_end(client: socket.socket) -> bytes:
    answer = b""
    try:
        while part := client.recv(65_536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


@pytest.mark.parametrize("body", [b"", b"{"])
def test_a_body_that_does_not_come_is_answered_408(impatient: tuple[str, int], body: bytes) -> None:
    with socket.create_connection(impatient, timeout=20) as client:
        client.sendall(POST + b"Content-Length: 1000\r\n\r\n" + body)
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"


def test_a_long_answer_is_awaited_longer_than_a_body(redis_url: str, connection: Redis) -> None:
    body = {"model": ALIAS, "prompt": "x", "max_tokens": 20, "ignore_eos": True}
    with (
        running_worker(redis_url, step_seconds=0.05),
        running_gateway(redis_url, Limits(patience=0.5)) as url,
    ):
        wait_for(lambda: connection.exists("omlx:models"))
        answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200


def test_a_client_that_does_not_read_loses_its_connection_and_its_job(
    impatient: tuple[str, int], redis_url: str, connection: Redis
) -> None:
    asked = {"model": ALIAS, "prompt": "x", "max_tokens": 9_000, "stream": True, "logprobs": 5}
    body = json.dumps({**asked, "ignore_eos": True, "n": 4}).encode()
    with running_worker(redis_url, step_seconds=0.001), socket.socket() as client:
        wait_for(lambda: connection.exists("omlx:models"))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(impatient)
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        wait_for(lambda: started(connection))
        [key] = connection.keys("rq:job:*")
        job_id = key.decode().removeprefix("rq:job:")
        wait_for(lambda: is_over(fetch(connection, job_id)), 60)
        assert status(fetch(connection, job_id)) == "stopped"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nX-Slow: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\n",
        b"POST /nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half of the headers", "half of the second headers", "half of a refused body"],
)
def test_a_new_connection_beyond_the_limit_closes_the_one_that_is_idle_longest(
    redis_url: str, sent: bytes
) -> None:
    with (
        running_gateway(redis_url, Limits(connections=3)) as url,
        contextlib.ExitStack() as stack,
    ):
        where = ("127.0.0.1", int(url.rpartition(":")[2]))
        connect = partial(socket.create_connection, where, timeout=20)
        busy = stack.enter_context(connect())
        busy.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        clients = []
        for _ in range(3):
            clients.append(stack.enter_context(connect()))
            clients[-1].sendall(sent)
            assert httpx2.get(f"{url}/health").status_code == 200
        read_to_end(clients[0])
        busy.sendall(b"x" * 1000)
        assert busy.recv(65_536).startswith(b"HTTP/1.1 400 ")


def test_a_request_beyond_connections_that_are_all_at_work_is_told_to_come_again(
    redis_url: str,
) -> None:
    with running_gateway(redis_url, Limits(connections=2)) as url, contextlib.ExitStack() as stack:
        where = ("127.0.0.1", int(url.rpartition(":")[2]))
        busy = [stack.enter_context(socket.create_connection(where, timeout=20)) for _ in range(2)]
        for client in busy:
            client.sendall(POST + b"Content-Length: 1000\r\n\r\n")
        answer = wait_for(lambda: found if (found := httpx2.get(url)).is_error else None)
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "too_many_connections"
        assert (answer.headers["connection"], answer.headers["retry-after"]) == ("close", "5")
        busy[0].close()
        wait_for(lambda: httpx2.get(f"{url}/health").status_code == 200)


def test_more_idle_connections_than_files_leave_the_gateway_at_work(
    redis_url: str, tmp_path: Path
) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        gateway_process(redis_url, port := free_port(), stderr=log, files=128),
        contextlib.ExitStack() as stack,
    ):
        for _ in range(180):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        assert httpx2.get(f"http://127.0.0.1:{port}/health", timeout=20).status_code == 200
    logged = (tmp_path / "log").read_text()
    assert "--max-connections: got 1024, and this system allows 128 open files" in logged
    assert "Traceback" not in logged


def test_long_bodies_are_held_together_up_to_a_limit_until_they_are_jobs(
    redis_url: str, connection: Redis
) -> None:
    announce(connection, ALIAS, context=10**6)
    jobs = queue(connection, "high")
    body = json.dumps({"model": ALIAS, "prompt": "x" * 199_000}).encode()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(running_gateway(redis_url, Limits(body_bytes=200_000)))
        where = ("127.0.0.1", int(url.rpartition(":")[2]))

        def asking(body: bytes, sent: int) -> socket.socket:
            client = stack.enter_context(socket.create_connection(where, timeout=20))
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:sent])
            return client

        for count in range(1, 4):
            asking(body, len(body))
            wait_for(lambda count=count: jobs.count == count)
        clients = [asking(body, len(body) - 1) for _ in range(3)]
        [refused], _, _ = select.select(clients, [], [], 20)
        head, _, answer = read_to_end(refused).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head
        assert json.loads(answer)["error"]["code"] == "too_many_bodies"
        clients.remove(refused)
        short = body[:40] + b'"}'
        asking(short, len(short))
        wait_for(lambda: jobs.count == 4)
        for client in clients:
            client.sendall(body[-1:])
        wait_for(lambda: jobs.count == 6)


def test_without_its_extra_the_command_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['starlette'] = None; from omlx_gateway.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "install it with pip install 'omlx-queue[gateway]'" in done.stderr
    assert "Traceback" not in done.stderr
