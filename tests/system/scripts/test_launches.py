"""What a decode step costs on a Mac, counted and not timed: the kernels that it launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MOST = {
    ("llama-8b", "0"): 0.8,
    ("qwen3-0.6b", "0"): 0.8,
    ("4b", "0"): 0.6,
    ("4b", "3"): 0.9,
    ("35b-a3b", "0"): 0.6,
    ("35b-a3b", "3"): 0.9,
}
"""Shares of mlx-lm's launches, by model and drafts."""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    command = [sys.executable, "-m", "scripts.bench.launches", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("model", "drafts"), MOST)
def test_a_step_launches_fewer_kernels_than_mlx_lms(
    counted: dict[str, dict[str, int]], model: str, drafts: str
) -> None:
    found = counted[model]

    assert found[drafts] <= MOST[model, drafts] * found["mlx-lm"]


@pytest.mark.parametrize("model", sorted({model for model, _ in MOST}))
def test_a_step_without_drafts_costs_auto_few_kernels(
    counted: dict[str, dict[str, int]], model: str
) -> None:
    assert counted[model]["0 of auto"] <= 1.04 * counted[model]["0"]
