"""Inputs, clients as processes, and what they have written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import redis
from rq.defaults import RQ_KEY_PREFIX as RQ

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import Row
from omlx_producer.wire import MODELS_KEY, GenerationRequest, Priority
from tests.helpers.workers import ALIAS, wait_for

CODE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from omlx_producer.cli.main import main; main()"
)


def batch_line(custom_id: str, prompt: str = "hello", **body: Any) -> dict[str, Any]:
    body = {"model": ALIAS, "prompt": prompt, "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_jsonl(path: Path, documents: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def write_rows(path: Path, count: int, **body: Any) -> Path:
    return write_jsonl(path, [batch_line(f"r{n}", f"prompt {n}", **body) for n in range(count)])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def errors(output: Path) -> list[dict[str, Any]]:
    return lines(output.with_name(f"{output.name}.errors.jsonl"))


def ids(output: Path) -> list[str]:
    return [line["custom_id"] for line in lines(output)]


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def spawn(
    url: str, folder: Path, *args: str, stdin: IO[str] | None = None
) -> subprocess.Popen[str]:
    """omlx-submit as a process in a folder."""
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *args],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMLX_QUEUE_REDIS_URL": url,
        },
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def submit(url: str, folder: Path, *args: str, seconds: float = 90) -> tuple[int, str, str]:
    """omlx-submit to its end: exit code, stdout, stderr."""
    with spawn(url, folder, *args) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


def wait_for_model(connection: redis.Redis) -> None:
    wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS), what="a worker")


def jobs_in_redis(connection: redis.Redis) -> int:
    return len(list(connection.scan_iter(f"{RQ}:job:*", count=1000)))


def upload(
    connection: redis.Redis,
    rows: int = 3,
    model: str = "demo",
    priority: Priority = "bulk",
    **fields: Any,
) -> Batch:
    """Put a batch into Redis."""
    request = GenerationRequest.parse({"model": model, "prompt": "hi", **fields})
    batch = Batch.create(connection, priority=priority)
    batch.upload(Row(str(n), n, request, f"{n:024}") for n in range(1, rows + 1))
    return batch
