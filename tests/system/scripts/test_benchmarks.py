"""Every script of `scripts/bench` runs, as small as it goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "scripts" / "bench").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
SMALL = {
    "against_mlx_lm": "--rows 1 2 --depths 0 1 auto lookup --contexts 16 --tokens 2 --laps 1"
    " --settle 1 --learn 2 --read 16 --read-rows 1",
    "agreement": "--prompts 1 --tokens 4 --depths 1",
    "arrival": "--jobs 2 --longest 20 --every 0 --cold",
    "attention": "--heads 2 1 16 --layers 1 --rows 1 --widths 1 --contexts 16 --laps 1",
    "batch_memory": "--rows 2000",
    "bulk_million": "--rows 100",
    "constrained": "--rows 1 --beside 1 --depths 0 --contexts 16 --tokens 2 --laps 1 --settle 1",
    "copying": "--rows 1 --tokens 2 --prompt 50 --prompts 1 --learn 2",
    "depths": "--jobs 1 --tokens 4 --rounds 1 --laps 2 --warm-laps 0 --prompt-characters 20",
    "fixed_shapes": "--rows 2 --slots 2 --tokens 2 --context 16 --laps 1 --steps 1",
    "fleet": "--workers 2 --settle 1 --seconds 0.1 --rows 100000",
    "gateway": "--firsts 1 --streams 2",
    "launches": "--models llama-8b",
    "lease": "--jobs 16 --stock-jobs 2 --batches 4 --laps 1",
    "mixed_lengths": "--rows 1 --short 8 --long 16 --laps 1",
    "pictures": "--page 96 64 --pictures 2 --tokens 2 --at-once 2 --laps 1"
    " --beside 1 --beside-tokens 2",
    "pipeline": "--jobs 1 --tokens 4 --laps 1",
    "prompt_files": f"--old {ROOT} --rows 2 --file 0 4 8 --tokens 2 --max-batch 2 --laps 1",
    "report": "--print",
    "results": "--jobs 8 --laps 1",
    "scheduler_sim": "--machines apple --arrivals solo",
    "scoring": "--prompts 2 --length 16 --together 2 --laps 1",
    "whole_file": "--modes batched auto --rows 3 --at-once 2 --tokens 2 4 --laps 1",
}
"""Arguments by the name of a script."""

STARTED_BY_OTHERS = {"mlx_vlm_batch", "stock_job", "watched_worker"}


@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if each.rpartition(".")[2] not in STARTED_BY_OTHERS]
)
def test_a_benchmark_runs(script: str, tmp_path: Path) -> None:
    name = script.removeprefix("scripts.bench.")
    assert name in SMALL, f"give {name} arguments with which it runs for seconds"
    quick = {"MLX_DISABLE_COMPILE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", script, *SMALL[name].split()],
        cwd=ROOT,
        env=os.environ | quick,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or done.stderr.strip()
