"""The model that reads, from a folder of pictures to a table."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="its fonts are drawn: pip install matplotlib")

from scripts.reading_model.lines import draw

ROOT = Path(__file__).parents[2]
LINES, RIGHT = 200, 0.95


def test_nearly_all_lines_that_it_was_never_trained_on_are_read_exactly(tmp_path: Path) -> None:
    generator, scans = random.Random(65), tmp_path / "scans"
    scans.mkdir()
    drawn = {f"{number}.png": draw(generator, held=True) for number in range(LINES)}
    for name, drawing in drawn.items():
        drawing.picture.save(scans / name)
    code = "from omlx_worker.cli import main; main(prog_name='omlx-worker')"
    options = ("-m", ROOT / "examples/reader", scans, "-o", "read.csv", "--template", "Read.")
    subprocess.run(
        [sys.executable, "-c", code, "batch", *options],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMLX_QUEUE_REDIS_DIR": str(tmp_path / "redis"),
            "OMLX_QUEUE_STATE_DIR": str(tmp_path),
            "MLX_DISABLE_COMPILE": "1",
        },
        check=True,
        timeout=600,
    )
    with (tmp_path / "read.csv").open(newline="") as table:
        read = {row["custom_id"]: row["text"] for row in csv.DictReader(table)}
    assert read.keys() == drawn.keys()
    right = sum(read[name] == drawing.text for name, drawing in drawn.items())
    assert right >= RIGHT * LINES, f"{right} of {LINES}"
