"""With ``RQ_KEY_PREFIX``, this project reads and writes RQ's keys under that prefix."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = [
    *(f"tests/integration/worker/test_{name}.py" for name in ("lease", "lease_writing")),
    *(
        f"tests/integration/worker/test_rq_{name}.py"
        for name in ("cancel", "commands", "endings", "promises", "worker")
    ),
    *(f"tests/integration/producer/test_{name}.py" for name in ("cancel", "requeued")),
    "tests/integration/producer/bulk/test_batch.py",
    "tests/integration/producer/bulk/test_collector.py",
]


@pytest.mark.parametrize("prefix", ["x", "{omlx}"])
def test_jobs_are_served_under_another_prefix(prefix: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *FILES]
    environment = {**os.environ, "RQ_KEY_PREFIX": prefix}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
