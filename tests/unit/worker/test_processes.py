"""Children end with their parent, and which processes of this machine live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omlx_worker.processes import Child, lives
from tests.helpers.workers import wait_for

POLITE = "trap 'echo asked; exit' TERM; echo runs; while :; do sleep 0.05; done"
STUBBORN = "trap '' TERM; echo runs; while :; do sleep 0.05; done"


@pytest.mark.parametrize("program", [POLITE, STUBBORN])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, program: str) -> None:
    code = (
        "import sys, time; from omlx_worker.processes import Child\n"
        "with open(sys.argv[1], 'wb') as log: child = Child(sys.argv[2:], log, seconds=1)\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(log), "/bin/sh", "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for(lambda: log.read_text() == "runs\n")
        assert os.getsid(child) == child, "Ctrl-C reaches the parent alone"
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not lives(child))
    assert ("asked" in log.read_text()) == (program == POLITE)
    wait_for(lambda: not group_lives(child))


@pytest.mark.parametrize(
    ("program", "patience", "code"),
    [(POLITE, [20.0], 0), (STUBBORN, [0.1, 0.1], -signal.SIGKILL), (POLITE, [], -signal.SIGKILL)],
)
def test_a_child_is_asked_to_end_before_it_is_killed(
    tmp_path: Path, program: str, patience: list[float], code: int
) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = Child(["/bin/sh", "-c", program], log, seconds=600)
    wait_for(lambda: child.last_line == "runs")
    assert child.code is None
    child.end(*patience)
    assert child.code == code
    wait_for(lambda: not group_lives(child.pid))


def group_lives(group: int) -> bool:
    """Whether a process of a group is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_a_process_lives_until_its_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert lives(child.pid)
    child.communicate(b"\n")
    assert not lives(child.pid)
    assert not lives(os.getpid()), "it has the id of the one before it in a restarted container"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_process_has_ended_though_its_parent_has_not_asked_how() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin
    child.stdin.close()
    # Not asked for: the child stays in the table of processes until the end of the test.
    wait_for(lambda: not lives(child.pid))
    os.kill(child.pid, 0)
    child.wait()
