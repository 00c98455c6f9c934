"""What a gateway takes of its clients, all together."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx2
import pytest
from redis import Redis

from omlx_gateway.limits import Limits
from omlx_producer.wire.json_limits import read_json
from omlx_worker.queue.embedded import free_port
from tests.helpers.fake_worker import announce
from tests.helpers.gateway import error_of, gateway_process, is_healthy, running_gateway
from tests.helpers.workers import ALIAS, queue, wait_for

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_idle_connections_beyond_the_limits_of_files_leave_the_gateway_at_work(
    redis_url: str, tmp_path: Path
) -> None:
    log, port = tmp_path / "log", free_port()
    with (
        log.open("wb") as stream,
        gateway_process(redis_url, port, stderr=stream, files=64, most_files=600) as gateway,
        contextlib.ExitStack() as stack,
    ):

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))

        for _ in range(180):
            connect()
        assert is_healthy(port, gateway), "beyond the soft limit"
        last = [connect() for _ in range(500)][-1]
        refusal = b"".join(iter(partial(last.recv, 65_536), b""))
        head, _, body = refusal.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 "), "beyond the hard one"
        assert "ulimit -n" in json.loads(body)["error"]["message"]
        stack.close()
        wait_for(lambda: is_healthy(port, gateway))
    [line] = log.read_text().splitlines()[1:]
    assert "connections are open" in line


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
        short = body[:40] + b'"}'
        # It is a job after the last long body was let go.
        asking(short, len(short))
        wait_for(lambda: jobs.count == 4)
        clients = [asking(body, len(body) - 1) for _ in range(3)]
        [refused], _, _ = select.select(clients, [], [], 20)
        refusal = b"".join(iter(partial(refused.recv, 65_536), b""))
        head, _, answer = refusal.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 5" in head
        assert json.loads(answer)["error"]["code"] == "too_many_bodies"
        clients.remove(refused)
        asking(short, len(short))
        wait_for(lambda: jobs.count == 5)
        for client in clients:
            client.sendall(body[-1:])
        wait_for(lambda: jobs.count == 7)


def test_a_gateway_answers_others_while_it_reads_a_long_body(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, answered = threading.Event(), threading.Event()

    def read(text: str) -> object:
        reading.set()
        assert answered.wait(20)
        return read_json(text)

    monkeypatch.setattr("omlx_gateway.gateway.read_json", read)
    with running_gateway(redis_url) as url, ThreadPoolExecutor() as pool:
        body = {"model": ALIAS, "prompt": "x" * 100_000, "n": "many"}
        long = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=30)
        assert reading.wait(20)
        assert httpx2.get(f"{url}/health", timeout=10).status_code == 200
        answered.set()
        assert long.result().status_code == 400


def test_a_client_reads_its_refusal_after_it_has_sent_all(redis_url: str) -> None:
    body = b"x" * 8_000_000
    with running_gateway(redis_url, Limits(body_bytes=200_000)) as url:
        where = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(where, timeout=20) as client:
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(65_536).startswith(b"HTTP/1.1 413 ")


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


def test_a_gateway_that_stops_answers_who_waits_and_cancels_their_jobs(
    redis_url: str, connection: Redis
) -> None:
    announce(connection, ALIAS)
    jobs = queue(connection, "high")
    with ThreadPoolExecutor() as pool, running_gateway(redis_url) as url:
        body = {"model": ALIAS, "prompt": "x"}
        asked = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=30)
        wait_for(lambda: jobs.count == 1)
    assert asked.result().status_code == 503
    assert error_of(asked.result())["code"] == "gateway_stops"
    assert jobs.count == 0, "its job waits on"


def test_a_second_signal_to_stop_is_no_error(redis_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as stream,
        gateway_process(redis_url, free_port(), stderr=stream) as gateway,
    ):
        for _ in range(2):
            gateway.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert gateway.wait(20) == 0
    assert len(log.read_text().splitlines()) == 1
