"""Checkpoints of other families, from a folder to results through a real worker and server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlx_lm import stream_generate
from redis import Redis
from rq.job import Job
from rq.serializers import JSONSerializer

from omlx_worker.engine.loading.loader import load
from tests.helpers.checkpoints import write_family

TOKENS, LONG = 60, 600
PROMPT = "def greet(name):\n    "


def launch(name: str, *arguments: str, redis_url: str) -> subprocess.Popen[str]:
    """Start a command of the project."""
    module = {"omlx-worker": "omlx_worker.cli", "omlx-submit": "omlx_producer.cli.main"}[name]
    return subprocess.Popen(
        [sys.executable, "-c", f"from {module} import main; main()", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMLX_QUEUE_REDIS_URL": redis_url,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def command(name: str, *arguments: str, redis_url: str) -> str:
    """Run a command of the project and return its stdout."""
    process = launch(name, *arguments, redis_url=redis_url)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


def submit(family: str, tokens: int, redis_url: str) -> str:
    """Queue a greedy job and return its id."""
    options = [
        "--raw",
        "-m",
        family,
        "--queue-anyway",
        "--detach",
        "--temperature",
        "0",
        "--ignore-eos",
    ]
    asked = ["submit", PROMPT, *options, "--max-tokens", str(tokens)]
    return command("omlx-submit", *asked, redis_url=redis_url).strip()


def check_text(job: str, folder: Path, tokens: int, redis_url: str) -> None:
    """Wait for a job and compare its text with mlx-lm's own."""
    network, tokenizer, _ = load(folder)
    tokenizer._eos_token_ids = set()
    wanted = [response.token for response in stream_generate(network, tokenizer, PROMPT, tokens)]
    result = json.loads(command("omlx-submit", "result", job, "--json", redis_url=redis_url))
    # Half a character at the end is dropped; one that is none at all is shown.
    text = result["choices"][0]["text"].rstrip("\ufffd")
    assert text == tokenizer.decode(wanted).rstrip("\ufffd")
    assert len(set(wanted)) > 5, "the text is trivial"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_folder_with_a_checkpoint_serves_a_job_with_mlx_lms_own_text(
    tmp_path: Path, redis_url: str, family: str
) -> None:
    folder = write_family(tmp_path / family, family)
    job = submit(family, TOKENS, redis_url)

    command("omlx-worker", "run", "-m", str(folder), "--burst", redis_url=redis_url)

    check_text(job, folder, TOKENS, redis_url)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2"])
def test_a_job_whose_worker_is_killed_ends_with_the_same_text(
    tmp_path: Path, redis_url: str, connection: Redis, family: str
) -> None:
    folder = write_family(tmp_path / family, family)
    serve = ["omlx-worker", "run", "-m", str(folder), "--lease-seconds", "2"]
    job = submit(family, LONG, redis_url)
    worker = launch(*serve, redis_url=redis_url)
    deadline = time.monotonic() + 60
    while not connection.xlen(f"omlx:events:{job}"):
        assert time.monotonic() < deadline, "no token came"
        time.sleep(0.01)
    worker.kill()
    worker.communicate()
    assert not Job.fetch(job, connection, serializer=JSONSerializer).is_finished

    worker = launch(*serve, redis_url=redis_url)

    try:
        check_text(job, folder, LONG, redis_url)
    finally:
        worker.terminate()
        worker.communicate(timeout=60)
