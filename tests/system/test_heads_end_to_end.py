"""A copy without its head, the hint, and the same jobs with the head of the original."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from tests.helpers.checkpoints import convert_without_head, shard
from tests.helpers.hub import hub_server

PROMPT = "def area(width, height):\n    "
HINT = re.compile(r"get it with: omlx-worker ([^\"]*)")
ACCEPTED = re.compile(r'"accepted": ([\d.]+)')


def test_the_command_of_the_hint_gets_the_head_from_the_hub(tmp_path: Path, redis_url: str) -> None:
    original = shard(shutil.copytree(resolve(DEMO), tmp_path / "original"))
    copy = convert_without_head(original, tmp_path / "copy")
    (copy / "README.md").write_text("---\nbase_model: makers/original\n---\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMLX_QUEUE_REDIS_URL": redis_url,
        "OMLX_QUEUE_STATE_DIR": str(tmp_path / "state"),
        "HF_HOME": str(tmp_path / "hub-cache"),
    }

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [sys.executable, "-c", f"from {module} import main; main()", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return ended

    def serve(*options: str) -> tuple[dict[str, Any], str]:
        """A greedy job's result, and the log of the worker that ran it."""
        asked = ["--raw", "--temperature", "0", "--max-tokens", "60", "--ignore-eos"]
        queued = [*asked, "-m", "copy", "--queue-anyway", "--detach", PROMPT]
        job = run("omlx_producer.cli.main", "submit", *queued).stdout.strip()
        ours = ["--burst", "--mode", "mtp", "--drafter", "head", "--log-format", "json"]
        log = run("omlx_worker.cli", *options, *ours).stderr
        return json.loads(run("omlx_producer.cli.main", "result", job, "--json").stdout), log

    plain, log = serve("run", "-m", str(copy))
    assert not ACCEPTED.findall(log)
    [command] = HINT.findall(log)
    assert command == f"run -m {copy} --mtp-from makers/original"

    with hub_server() as hub:
        hub.repositories["makers/original"] = original
        environment["HF_ENDPOINT"] = hub.url
        drafted, first = serve(*shlex.split(command))
        assert hub.weights_served == ["model-00003-of-00003.safetensors"]
    again, second = serve(*shlex.split(command))

    assert drafted["choices"] == again["choices"] == plain["choices"]
    for log in (first, second):
        assert not HINT.findall(log)
        assert max(map(float, ACCEPTED.findall(log))) > 0.5
