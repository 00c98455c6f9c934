"""A Mac stays awake while rows run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest

from omlx_worker.mac.machine import Mac


class System:
    """A caffeinate that does nothing, and what was started of it."""

    def __init__(self) -> None:
        self.commands: list[Sequence[str]] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.commands.append(command)
        self.processes.append(subprocess.Popen(["sleep", "60"]))
        return self.processes[-1]


def test_the_machine_stays_awake_while_rows_run() -> None:
    system = System()
    mac = Mac(allow_sleep=False, start=system.start)
    for busy in (False, True, True, False, True, False):
        mac.keep_awake(busy)
    assert system.commands == [["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]] * 2
    assert None not in [process.returncode for process in system.processes]


def test_it_may_sleep_if_asked_so() -> None:
    system = System()
    Mac(allow_sleep=True, start=system.start).keep_awake(True)
    assert not system.commands


def test_a_mac_that_cannot_be_kept_awake_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Sequence[str]) -> subprocess.Popen[bytes]:
        raise OSError("no more processes")

    mac = Mac(allow_sleep=False, start=fail)
    for _ in range(2):
        mac.keep_awake(True)
    assert caplog.messages == ["cannot keep this Mac awake: no more processes"]
