"""`scripts.bench.pipeline` end to end, with an engine that sleeps in the place of a model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.workers import wait_for

ROOT = Path(__file__).parents[3]
QUICK = ("--step", "0.002", "--tokens", "12")
SIDES = {"in process", "worker"}


@contextmanager
def pipeline(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The benchmark as a process; killed when the block ends before it does."""
    command = [sys.executable, "-m", "scripts.bench.pipeline", *QUICK, *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has its children ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_every_side_of_every_point_is_measured_with_the_same_tokens(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ("--jobs", 32, 1, "--laps", 2, "--json", report)
    with pipeline(*arguments) as run:
        told, complaints = run.communicate(timeout=240)
    assert run.returncode == 0, complaints
    points = {point["jobs"]: point["laps"] for point in json.loads(report.read_text())["points"]}
    assert [set(lap) for lap in points[1]] == [SIDES] * 2
    assert [set(lap) for lap in points[32]] == [SIDES | {"one slow"}] * 2
    for laps in points.values():
        for lap in laps:
            speed = lap["in process"]["tokens_per_second"]
            assert 0 < lap["worker"]["tokens_per_second"] < 2 * speed
            assert lap["worker"]["first"] > 0
            assert lap["worker"]["gap_p50"] <= lap["worker"]["gap_p99"]
    assert "worker / in process" in told
    [head] = [line.split() for line in told.splitlines() if "jobs at once" in line]
    assert head == ["jobs", "at", "once", "1", "32"]
    assert "one slow / none slow" in told


def test_what_was_measured_is_kept_and_shown_when_it_is_interrupted(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with pipeline("--jobs", 1, 2, "--laps", 500, "--json", report) as run:
        wait_for(report.exists, 120, "the first lap")
        run.send_signal(signal.SIGINT)
        told, complaints = run.communicate(timeout=120)
    assert run.returncode == 0, complaints
    assert "interrupted" in complaints
    assert "worker / in process" in told
    (point,) = json.loads(report.read_text())["points"]
    assert point["jobs"] == 1
    assert point["laps"]
