"""Kill -9 of the gateway during an upload, of a worker and of Redis: every row once."""

from __future__ import annotations

import contextlib
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from openai import OpenAI

from omlx_worker.queue.embedded import free_port
from tests.helpers.gateway import gateway_process
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import ALIAS, wait_for, worker_process

pytestmark = pytest.mark.timeout(300)

ROWS = 2000


def write_input(path: Path) -> None:
    with path.open("w") as stream:
        for number in range(ROWS):
            body = {"model": ALIAS, "prompt": f"prompt {number}", "max_tokens": 6, "seed": number}
            url = "/v1/completions"
            row = {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}
            stream.write(json.dumps(row) + "\n")


def states(connection: redis.Redis) -> list[tuple[bytes, int]]:
    """The batches of the queue: state and rows."""
    keys = [key for key in connection.keys("omlx:batch:*") if key.count(b":") == 2]
    found: Any = [connection.hmget(key, "state", "rows", "created_at") for key in keys]
    return [(state, int(rows or 0)) for state, rows, created in found if created]


def test_2000_rows_run_once_though_everything_is_killed(tmp_path: Path) -> None:
    source, port = tmp_path / "rows.jsonl", free_port()
    write_input(source)
    with redis_server("--appendonly", "yes") as server, contextlib.ExitStack() as stack:
        connection = stack.enter_context(redis.Redis.from_url(server.url))
        client = stack.enter_context(
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20)
        )

        def start_worker() -> subprocess.Popen[bytes]:
            return stack.enter_context(worker_process(server.url, max_rows=16, step_seconds=0.002))

        worker = start_worker()
        wait_for(lambda: connection.exists("omlx:models"))
        with gateway_process(server.url, port) as gateway:
            with source.open("rb") as stream:
                file = client.files.create(file=stream, purpose="batch")
            asked = stack.enter_context(ThreadPoolExecutor()).submit(
                client.batches.create,
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                extra_headers={"Idempotency-Key": "one"},
            )
            wait_for(lambda: any(rows >= 200 for _, rows in states(connection)))
            gateway.kill()
        [(state, rows)] = states(connection)
        assert state == b"uploading", f"the upload was over before the kill, with {rows} rows"

        stack.enter_context(gateway_process(server.url, port))

        # Its client repeats it until the upload that was killed may be replaced.
        batch = asked.result(60)

        def completed() -> int:
            found = client.batches.retrieve(batch.id)
            assert found.status in ("in_progress", "completed"), found
            return found.request_counts.completed if found.request_counts else 0

        wait_for(lambda: completed() >= ROWS // 10, 60)
        worker.kill()
        start_worker()
        wait_for(lambda: completed() >= ROWS // 2, 60)
        server.kill()
        server.start()
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed", 120)

        done = client.batches.retrieve(batch.id)
        assert done.request_counts
        assert done.request_counts.model_dump() == {"total": ROWS, "completed": ROWS, "failed": 0}
        assert done.error_file_id is None
        lines = client.files.content(done.output_file_id or "").text.splitlines()
        assert [json.loads(line)["custom_id"] for line in lines] == [f"r{n}" for n in range(ROWS)]
        # No other batch was opened: no row ran beside these.
        assert states(connection) == [(b"done", ROWS)]
