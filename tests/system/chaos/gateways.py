"""Gateways that are replaced when they fall, and clients that go from one to another."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import httpx2

from omlx_producer.program import UNREACHABLE
from omlx_worker.queue.embedded import free_port
from tests.helpers.workers import ALIAS
from tests.system.chaos.bulk import BulkRows
from tests.system.chaos.clients import GATEWAY
from tests.system.chaos.processes import ChaosWorker
from tests.system.chaos.workload import Accepted, planned
from tests.system.chaos.world import World

PATIENCE = 2.0
"""Seconds without a byte after which a client goes to another gateway."""
PAUSE = 0.05
LATEST = 2.0
"""Seconds until the last client begins."""
ENDPOINT = "/v1/completions"


class Gateways:
    """Some gateways of one server, each at a port of its own."""

    def __init__(self, place: World, folder: Path, count: int) -> None:
        self._place = place
        self._folder = folder
        self._standing = {port: self._start(port) for port in (free_port() for _ in range(count))}
        self.urls = [f"http://127.0.0.1:{port}" for port in self._standing]

    def _start(self, port: int) -> ChaosWorker:
        log, folder = str(self._folder / "processes.log"), str(self._folder)
        return self._place.start_client(log=log, folder=folder, args=[GATEWAY, str(port)])

    def replace_the_fallen(self) -> list[str]:
        """Start those again that were killed; returns a sentence for each that ended by itself."""
        problems = []
        for port, process in self._standing.items():
            if process.alive:
                continue
            # One that starts while the server falls refuses to, as without a server.
            if process.code not in (-signal.SIGKILL, UNREACHABLE):
                problems.append(f"the gateway at {port} ended by itself with {process.code}")
            self._standing[port] = self._start(port)
        return problems

    def kill_one(self, random: Random) -> None:
        port = random.choice(list(self._standing))
        self._place.note(f"the gateway at {port} is killed")
        self._standing[port].kill()

    def pause_one(self, random: Random, seconds: float) -> None:
        port = random.choice(list(self._standing))
        process = self._standing[port]
        self._place.note(f"the gateway at {port} is paused for {seconds:.2f} s")
        process.send(signal.SIGSTOP)
        time.sleep(seconds)
        process.send(signal.SIGCONT)

    def dismiss(self) -> None:
        for process in self._standing.values():
            process.kill()


class Unavailable(Exception):
    """Ask again, maybe another gateway."""


class HttpClient(threading.Thread):
    """Does one thing through the gateways, as often as it takes.

    Attributes:
        problems: what went wrong.
    """

    def __init__(self, urls: list[str], random: Random) -> None:
        super().__init__(daemon=True)
        self._urls = random.sample(urls, len(urls))
        self._http = httpx2.Client(timeout=PATIENCE)
        self._delay = random.uniform(0, LATEST)
        self._dismissed = threading.Event()
        self.problems: list[str] = []

    def run(self) -> None:
        time.sleep(self._delay)
        try:
            with self._http:
                self.work()
        except Exception as error:  # noqa: BLE001 (told by `problems`)
            self.problems.append(f"{self}: {type(error).__name__}: {error}")

    def work(self) -> None:
        raise NotImplementedError

    def dismiss(self) -> None:
        self._dismissed.set()

    def attempts(self) -> Iterator[str]:
        """The URLs to try, one after another, until the client is dismissed."""
        while not self._dismissed.is_set():
            yield self._urls[0]
            self._urls.append(self._urls.pop(0))
            time.sleep(PAUSE)
        raise RuntimeError("is not done")

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """The first answer that is none of a gateway or a server that is away."""
        for url in self.attempts():
            try:
                answer = self._http.request(method, url + path, **options)
                require_ok(answer.status_code, answer.text)
            except (httpx2.TransportError, Unavailable):
                continue
            return answer
        raise AssertionError


def require_ok(status: int, text: str) -> None:
    """Refuse all answers but good ones.

    Raises:
        Unavailable: for the one that asks to come again.
        AssertionError: for the others.
    """
    error = {} if status == 200 else json.loads(text)["error"]
    if (status, error.get("code")) in ((503, "redis_unavailable"), (409, "batch_is_uploaded")):
        raise Unavailable
    assert status == 200, f"{status} {text}"


class Chat(HttpClient):
    """Asks for one chat, streamed or whole, by an idempotency key."""

    def __init__(self, urls: list[str], random: Random, number: int) -> None:
        super().__init__(urls, random)
        self._streams = random.random() < 0.7
        self._body: dict[str, Any] = {
            "model": ALIAS,
            "messages": [{"role": "user", "content": f"chat {number} " * random.randint(1, 4)}],
            "max_completion_tokens": random.randint(1, 400),
            "seed": random.randrange(2**31),
            "n": random.choice([1, 1, 2]),
        }
        self._key = uuid4().hex
        self.job = Accepted(*planned(self._key, "high", {**self._body, "stream": self._streams}))

    def __str__(self) -> str:
        return f"the {'stream' if self._streams else 'chat'} of job {self.job.id}"

    def work(self) -> None:
        texts = self._stream() if self._streams else self._whole()
        if texts != self.job.texts:
            self.problems.append(f"{self} has had {texts}, not {self.job.texts}")

    def _whole(self) -> list[str]:
        headers = {"Idempotency-Key": self._key}
        answer = self.ask("POST", "/v1/chat/completions", json=self._body, headers=headers)
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    def _stream(self) -> list[str]:
        texts, last = [""] * self._body["n"], ""
        for url in self.attempts():
            headers = {"Last-Event-ID": last} if last else {"Idempotency-Key": self._key}
            # What came after the last id comes again.
            told = list(texts)
            try:
                for event_id, data in self._events(url, headers):
                    if data == "[DONE]":
                        return told
                    add(told, json.loads(data))
                    if event_id:
                        texts, last = list(told), event_id
            except (httpx2.TransportError, Unavailable):
                continue
        raise AssertionError

    def _events(self, url: str, headers: dict[str, str]) -> Iterator[tuple[str, str]]:
        """The id, if it has one, and the data of each event."""
        body = {**self._body, "stream": True}
        path, event_id = f"{url}/v1/chat/completions", ""
        with self._http.stream("POST", path, json=body, headers=headers) as answer:
            if answer.status_code != 200:
                require_ok(answer.status_code, answer.read().decode())
            for line in answer.iter_lines():
                if line.startswith("id: "):
                    event_id = line[4:]
                elif line.startswith("data: "):
                    yield event_id, line[6:]
                    event_id = ""


def add(texts: list[str], chunk: dict[str, Any]) -> None:
    """Add a chunk's text to that of its choices."""
    if error := chunk.get("error"):
        require_ok(503 if error["code"] == "redis_unavailable" else 500, json.dumps(chunk))
    for choice in chunk["choices"]:
        texts[choice["index"]] += choice["delta"].get("content") or ""


class FileBatch(HttpClient):
    """Uploads a file, makes a batch of it, and reads its output."""

    def __init__(self, urls: list[str], random: Random, path: Path) -> None:
        super().__init__(urls, random)
        self._rows = BulkRows(path, random, chats=False)  # a batch has one endpoint
        self._content = path.read_bytes()
        self._key = uuid4().hex

    def __str__(self) -> str:
        return "the batch"

    def work(self) -> None:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("rows.jsonl", self._content)}}
        file = self.ask("POST", "/v1/files", **form).json()["id"]
        body = {"input_file_id": file, "endpoint": ENDPOINT, "completion_window": "24h"}
        headers = {"Idempotency-Key": self._key}
        batch = self.ask("POST", "/v1/batches", json=body, headers=headers).json()["id"]
        while True:
            found = self.ask("GET", f"/v1/batches/{batch}").json()
            if found["status"] == "completed":
                break
            assert found["status"] in ("validating", "in_progress"), found
            time.sleep(PAUSE)
        output = self.ask("GET", f"/v1/files/{found['output_file_id']}/content").text
        lines = [
            {"custom_id": line["custom_id"], "response": {"body": line["response"]["body"]}}
            for line in map(json.loads, output.splitlines())
        ]
        self.problems += self._rows.problems(str(self), lines)
