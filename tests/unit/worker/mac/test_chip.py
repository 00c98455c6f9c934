"""What a Mac tells of its chip, as `sysctl` and `ioreg` print it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from subprocess import CalledProcessError

import pytest

from omlx_worker.mac import chip

IOREG = b"""\
+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X, id 0x100000469, registered, matched>
    {
      "model" = "Apple M3 Max"
      "gpu-core-count" = 40
    }
"""


@pytest.fixture
def _on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


def run(command: Sequence[str]) -> bytes:
    return b"Apple M3 Max\n" if command[0] == "sysctl" else IOREG


@pytest.mark.usefixtures("_on_a_mac")
def test_the_chip_and_the_cores_of_its_gpu_are_told() -> None:
    assert chip.facts(run) == {"chip": "Apple M3 Max", "gpu_cores": 40}


@pytest.mark.usefixtures("_on_a_mac")
def test_what_is_not_told_is_left_out() -> None:
    def refuse(command: Sequence[str]) -> bytes:
        if command[0] == "sysctl":
            raise CalledProcessError(1, command)
        return b""

    assert chip.facts(refuse) == {}


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert chip.facts(run) == {}
