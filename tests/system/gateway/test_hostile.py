"""A thousand hostile requests: each is refused in OpenAI's form, and none leaves anything."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from random import Random
from typing import Any

import pytest
from openai import OpenAI
from redis import Redis

from omlx_gateway.keys import add_key
from omlx_producer.wire import PRIORITIES
from omlx_worker.queue.embedded import free_port
from tests.helpers.gateway import gateway_process
from tests.helpers.workers import ALIAS, queue, started, wait_for, worker_process
from tests.system.gateway.attacks import BODY_LIMIT, INJECTED, KEY_MARK, Attack, Manner, attack

pytestmark = pytest.mark.timeout(600)

WARM_UP, REQUESTS, THREADS = 300, 1000, 16
ANSWER_SECONDS = 10.0
MEMORY_GROWTH = 32 * 2**20
SECRET = "what no request may read"
# RQ's lists and registries, and the models that workers announced: they never expire.
PERMANENT = re.compile(r"rq:(queues|workers.*|(finished|failed|canceled):.*)|omlx:models")


class Received(io.BytesIO):
    """All that came over a connection: one answer after another."""

    def makefile(self, *_: Any) -> Received:
        return self

    def close(self) -> None:
        """An answer that is whole closes what it was read from."""

    def answers(self, method: str) -> Iterator[tuple[int, dict[str, str], bytes]]:
        while self.tell() < len(self.getbuffer()):
            answer = HTTPResponse(self, method=method)  # type: ignore[arg-type]
            answer.begin()
            names = {name.lower(): text for name, text in answer.getheaders()}
            yield answer.status, names, answer.read()


class Attacker:
    """Sends attacks, and notes what is wrong with their answers."""

    def __init__(self, port: int, key: str) -> None:
        self._address = "127.0.0.1", port
        self._key = key.encode()
        self.problems: list[str] = []

    def send(self, attack: Attack) -> None:
        data = attack.data.replace(KEY_MARK, self._key)
        problem = ""
        try:
            received = Received(self._exchange(data, attack.manner))
            for answer in received.answers("HEAD" if data.startswith(b"HEAD ") else "GET"):
                problem = problem or problem_of(*answer)
        except HTTPException as error:
            problem = f"{error!r}: {received.getvalue()[:300]!r}"
        if problem:
            self.problems.append(f"{attack.manner.name} {attack.data[:600]!r}: {problem}")

    def _exchange(self, data: bytes, manner: Manner) -> bytes:
        """Send a request; returns what comes until the gateway hangs up."""
        received = b""
        with socket.socket() as client, contextlib.suppress(ConnectionError):
            client.settimeout(ANSWER_SECONDS)
            if manner is Manner.DEAF:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(self._address)
            pieces = [data]
            if manner is Manner.DRIP:
                pieces = [data[at : at + 1] for at in range(15)]
            elif manner is Manner.STOP:
                pieces = [data[: len(data) * 2 // 3]]
            # The gateway may answer, and hang up, before it has all.
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(0.1 if manner is Manner.DRIP else 0)
            if manner in (Manner.LEAVE, Manner.DEAF, Manner.STOP):
                time.sleep(0.5 if manner is Manner.DEAF else 0.05)
                return b""
            if b"\r\n\r\n" not in b"".join(pieces):
                # Half of the headers is no request, and waits for the rest.
                return b""
            # A body that is not whole is waited for.
            with contextlib.suppress(TimeoutError):
                while part := client.recv(65_536):
                    received += part
        return received


def problem_of(status: int, headers: dict[str, str], body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    shown = f"{status} {body[:300]!r}"
    if SECRET.encode() in body:
        return f"tells a secret: {shown}"
    if INJECTED in headers:
        return f"has a header of the request's making: {shown}"
    if status < 400 or not body:
        return "" if status < 500 else shown
    try:
        error = json.loads(body)["error"]
        names = set(error)
    except (ValueError, KeyError, TypeError):
        return f"is no error of OpenAI's: {shown}"
    if names != {"message", "type", "param", "code"} or "Traceback" in error["message"]:
        return f"is no error of OpenAI's: {shown}"
    if status >= 500 and not (status == 503 and error["code"] == "redis_unavailable"):
        return f"is the gateway's fault: {shown}"
    return ""


def everlasting(connection: Redis) -> list[str]:
    """The keys that never expire, and should."""
    keys = [key.decode() for key in connection.scan_iter(count=1000)]
    return [key for key in keys if not PERMANENT.fullmatch(key) and connection.ttl(key) == -1]


def resident_bytes(process: subprocess.Popen[bytes]) -> int:
    command = ["ps", "-o", "rss=", "-p", str(process.pid)]
    return 1024 * int(subprocess.run(command, capture_output=True, check=True).stdout)


def honest_chat(client: OpenAI) -> str:
    answer = client.chat.completions.create(
        model=ALIAS, messages=[{"role": "user", "content": "hello"}], max_tokens=8
    )
    return answer.choices[0].message.content or ""


def test_hostile_requests_are_refused_and_leave_nothing(
    redis_url: str, connection: Redis, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    keys, port = tmp_path / "keys", free_port()
    (tmp_path / "secret").write_text(SECRET)
    key = add_key(keys, "eve")
    random = Random(request.config.getoption("--chaos-seed"))
    options = [f"--api-keys={keys}", f"--max-body={BODY_LIMIT}"]
    attacker, log = Attacker(port, key), tmp_path / "log"
    with (
        log.open("wb") as stream,
        worker_process(redis_url, max_rows=32, step_seconds=0.001) as worker,
        gateway_process(redis_url, port, *options, stderr=stream) as gateway,
        OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0) as client,
    ):
        wait_for(lambda: connection.exists("omlx:models"))
        honest_chat(client)

        def attack_with(count: int) -> tuple[int, int]:
            """Returns bytes of memory, and connections to Redis, once all is quiet again."""
            attacks = [attack(random) for _ in range(count)]
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(attacker.send, attacks))
            waiting = [queue(connection, priority) for priority in PRIORITIES]
            wait_for(lambda: not any(each.count for each in waiting) and not started(connection))
            for file in client.files.list():
                client.files.delete(file.id)
            return resident_bytes(gateway), connection.info("clients")["connected_clients"]

        memory, clients = attack_with(WARM_UP)
        memory_after, clients_after = attack_with(REQUESTS)
        assert not attacker.problems, "\n".join(attacker.problems)
        assert honest_chat(client)
        assert (gateway.poll(), worker.poll()) == (None, None)
        assert not list(client.batches.list())
        assert everlasting(connection) == []
        assert clients_after <= clients + THREADS
        assert memory_after - memory < MEMORY_GROWTH
        assert not re.search("ERROR|Traceback", log.read_text())
