"""Checkpoints of other families, from a folder to results through a real worker and server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlx_lm import stream_generate

from omlx_worker.engine.loader import load
from tests.helpers.checkpoints import write_family

TOKENS = 60
PROMPT = "def greet(name):\n    "


def command(name: str, *arguments: str, redis_url: str) -> str:
    """Run a command of the project and return its stdout."""
    module = {"omlx-worker": "omlx_worker.cli", "omlx-submit": "omlx_producer.cli.main"}[name]
    ended = subprocess.run(
        [sys.executable, "-c", f"from {module} import main; main()", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMLX_QUEUE_REDIS_URL": redis_url,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.system
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_a_folder_with_a_checkpoint_serves_a_job_with_mlx_lms_own_text(
    tmp_path: Path, redis_url: str, family: str
) -> None:
    folder = write_family(tmp_path / family, family)
    options = ["-m", family, "--queue-anyway", "--detach", "--temperature", "0", "--ignore-eos"]
    asked = ["submit", PROMPT, *options, "--max-tokens", str(TOKENS)]
    job = command("omlx-submit", *asked, redis_url=redis_url).strip()

    command("omlx-worker", "run", "-m", str(folder), "--burst", redis_url=redis_url)

    network, tokenizer, _ = load(folder)
    tokenizer._eos_token_ids = set()
    wanted = [response.token for response in stream_generate(network, tokenizer, PROMPT, TOKENS)]
    result = json.loads(command("omlx-submit", "result", job, "--json", redis_url=redis_url))
    assert result["choices"][0]["text"] == tokenizer.decode(wanted).rstrip("\ufffd")
    assert len(set(wanted)) > 5, "the text is trivial"
