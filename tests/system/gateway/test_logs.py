"""No prompt, answer or API key is in a log, at the level and in the form that say most."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx2
from redis import Redis

from omlx_gateway.keys import add_key
from omlx_worker.queue.embedded import free_port
from tests.helpers.fake_engine import BREAKS_PREPARE
from tests.helpers.gateway import gateway_process
from tests.helpers.workers import ALIAS, enqueue, fetch, is_over, wait_for, worker_process

CANARY = "sing-canary-sing"
CHAT = {"model": ALIAS, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 200}
REFUSED: list[dict[str, Any]] = [
    *({"model": CANARY}, {"temperature": CANARY}, {CANARY: 1}, {"stop": [CANARY * 50]}),
    *({"tools": [{"type": CANARY}]}, {"messages": CANARY}, {"stream_options": CANARY}),
    {"messages": [{"role": CANARY, "content": CANARY}]},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": CANARY}}}},
    {"response_format": {"type": "regex", "pattern": f"({CANARY}"}},
]
BROKEN = [
    *(f"GET /{CANARY} HTTP/9\r\n\r\n", f"{CANARY}\r\n\r\n", f"GET / HTTP/1.1\r\n{CANARY}\r\n\r\n"),
    f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: {CANARY}\0\r\n\r\n",
]


def rows(*bodies: Any) -> bytes:
    found = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in found)


class Client:
    """Asks a gateway, and keeps the texts that it was answered."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http
        self.texts: list[str] = []

    def ask(self, method: str, path: str, **options: Any) -> httpx2.Response:
        return self._http.request(method, path, **options)

    def chat(self, **fields: Any) -> None:
        answer = self.ask("POST", "/v1/chat/completions", json={**CHAT, **fields})
        assert answer.status_code == 200, answer.text
        self.texts.append(answer.json()["choices"][0]["message"]["content"])

    def stream(self) -> None:
        answer = self.ask("POST", "/v1/chat/completions", json={**CHAT, "stream": True})
        data = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        deltas = [json.loads(each)["choices"][0]["delta"].get("content") or "" for each in data]
        self.texts += ["".join(deltas), *filter(lambda part: len(part) > 8, deltas)]

    def batch(self, content: bytes) -> dict[str, Any]:
        sent = {"data": {"purpose": "batch"}, "files": {"file": (f"{CANARY}.jsonl", content)}}
        file = self.ask("POST", "/v1/files", **sent).json()["id"]
        window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = self.ask("POST", "/v1/batches", json={"input_file_id": file, **window}).json()

        def over() -> dict[str, Any] | None:
            found: dict[str, Any] = self.ask("GET", f"/v1/batches/{made['id']}").json()
            return found if found["status"] in ("completed", "failed") else None

        ended: dict[str, Any] = wait_for(over)
        if output := ended["output_file_id"]:
            lines = self.ask("GET", f"/v1/files/{output}/content").text.splitlines()
            bodies = [json.loads(line)["response"]["body"] for line in lines]
            self.texts += [body["choices"][0]["message"]["content"] for body in bodies]
        return ended

    def refused(self) -> None:
        """Requests that quote the canary where it does not belong."""
        for fields in REFUSED:
            answer = self.ask("POST", "/v1/chat/completions", json={**CHAT, **fields})
            assert 400 <= answer.status_code < 500, answer.text
        kind = {"Content-Type": "application/json"}
        upload = {"Content-Type": "multipart/form-data; boundary=B"}
        stream = json.dumps({**CHAT, "stream": True})
        for path, headers, content in (
            ("/v1/chat/completions", kind, f'{{"{CANARY}'),
            ("/v1/batches", kind, json.dumps({CANARY: CANARY})),
            ("/v1/files", upload, f"--B{CANARY}\r\n{CANARY}"),
            ("/v1/files", upload, f"--B\r\n{CANARY}\0: {CANARY}\r\n\r\n"),
            (f"/v1/files/{CANARY}/content", kind, CANARY),
            (f"/v1/chat/completions?{CANARY}", {"Authorization": f"Bearer {CANARY}"}, CANARY),
            ("/v1/chat/completions", {**kind, "Last-Event-ID": CANARY}, stream),
            ("/v1/chat/completions", {**kind, "X-Omlx-Priority": CANARY}, json.dumps(CHAT)),
        ):
            answer = self.ask("POST", path, headers=headers, content=content)
            assert 400 <= answer.status_code < 500, answer.text


def test_no_prompt_answer_or_key_is_logged(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    keys, log, port = tmp_path / "keys", tmp_path / "log", free_port()
    key = add_key(keys, "ann")
    with (
        log.open("wb") as stream,
        worker_process(redis_url, stream, log_level="debug", log_format="json"),
        gateway_process(redis_url, port, f"--api-keys={keys}", stderr=stream),
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        wait_for(lambda: connection.exists("omlx:models"))
        http.headers["Authorization"] = f"Bearer {key}"
        client = Client(http)
        client.chat()
        client.chat(tools=[{"type": "function", "function": {"name": CANARY}}], tool_choice="none")
        client.stream()
        assert client.batch(rows(CHAT, CHAT))["status"] == "completed"
        assert client.batch(rows(CHAT, {**CHAT, "temperature": CANARY}))["status"] == "failed"
        assert client.batch(CANARY.encode())["status"] == "failed"
        client.refused()
        for request in BROKEN:
            with socket.create_connection(("127.0.0.1", port)) as broken:
                broken.sendall(request.encode())
                broken.recv(1)
        # What no gateway lets through, and what breaks the engine before its first step.
        jobs = [enqueue(connection, **{"prompt": CANARY, **fields}) for fields in REFUSED[1:4]]
        jobs.append(enqueue(connection, BREAKS_PREPARE))
        wait_for(lambda: all(is_over(fetch(connection, job.id)) for job in jobs))
    said = log.read_text()
    assert said.count(" starts") >= 5, said
    assert len(client.texts) == 5
    for secret in (CANARY, key, BREAKS_PREPARE, *client.texts):
        assert len(secret) > 8
        assert secret not in said
