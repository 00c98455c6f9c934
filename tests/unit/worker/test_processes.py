"""Which processes of this machine live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omlx_worker.processes import lives
from tests.helpers.workers import wait_for


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
