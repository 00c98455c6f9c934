"""The page of benchmarks says what was measured, and what was not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "bench"))

report = pytest.importorskip("report", reason="plots need matplotlib")


def measured(side: str, laps: list[float], **more: Any) -> dict[str, Any]:
    """What a side's laps come to, as `against_mlx_lm.py` writes it."""
    known = {"rows": 8, "context": 256, "temperature": 0.0, "rule": "coupled", "ratios": laps}
    known |= {"steps": 10, "seconds": 0.5, "tokens": 80, "peak": 3_000_000, "own": 2_000_000}
    known |= {"accepted": [], "depths": {}, "failed": ""}
    return {"side": side, "laps": laps, **known, **more}


def result(device: str, *decoding: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "demo",
        "dtype": "float32",
        "device": device,
        "cores": 2,
        "system": "Linux",
        "versions": {"mlx": "1"},
        "weights": 10**9,
        "command": "python scripts/bench/against_mlx_lm.py",
        "decoding": list(decoding),
        "reading": [],
    }


def test_a_side_that_failed_is_named_with_its_error_beside_those_that_did_not(
    tmp_path: Path,
) -> None:
    fine = [measured("K=0", [100.0, 110.0, 120.0], rows=rows) for rows in (1, 8, 32)]
    failed = measured("BatchGenerator", [], ratios=[], failed="RuntimeError: no memory")

    page = report.page([result("NVIDIA H200", failed, *fine)], "", tmp_path)

    assert "| BatchGenerator | failed: RuntimeError: no memory |" in page
    assert "| K=0 | 110 (100-120) |" in page
    assert (tmp_path / "gpu-0.svg").exists()


def test_auto_is_held_against_whichever_depth_was_the_best_lap_by_lap(tmp_path: Path) -> None:
    sides = [measured("K=0", [10.0, 10.0, 10.0]), measured("K=2", [20.0, 40.0, 30.0])]
    auto = measured("auto", [20.0, 20.0, 30.0], depths={"2": 30, "0": 4})

    page = report.page([result("x86_64 processor", *sides, auto)], "", tmp_path)

    assert "`auto` over K=2: 1.00 (0.50-1.00). Its steps by depth: 4 at 0, 30 at 2. " in page


def test_what_auto_chose_is_weighed_by_what_each_depth_came_to_by_itself(tmp_path: Path) -> None:
    slow = measured("K=0", [1.0], steps=10, seconds=1.0, tokens=100)
    fast = measured("K=2", [1.0], steps=10, seconds=1.5, tokens=300)
    auto = measured("auto", [1.0], depths={"2": 30, "0": 10})
    elsewhere = measured("auto", [1.0], depths={"2": 30, "1": 10})

    page = report.page([result("NVIDIA H200", slow, fast, auto)], "", tmp_path)
    other = report.page([result("NVIDIA H200", slow, fast, elsewhere)], "", tmp_path)

    # 1,000 tokens in 5.5 s, where K=2 makes 200 a second.
    assert "10 at 0, 30 at 2. At the figures above these would make 0.91." in page
    assert "10 at 1, 30 at 2.\n" in other


def test_notes_come_first_and_processors_and_gpus_have_sections_of_their_own(
    tmp_path: Path,
) -> None:
    cpu = result("x86_64 processor", measured("K=0", [1.0]))
    gpu = result("NVIDIA H200", measured("K=0", [1.0]))

    page = report.page([cpu, gpu], "## Notes", tmp_path)

    assert page.index("## Notes") < page.index("## GPU") < page.index("## CPU")
    assert "on one NVIDIA H200" in page
    assert "on 2 cores of an x86_64 processor" in page
