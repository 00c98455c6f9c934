"""What a worker minds of its Mac."""

from __future__ import annotations

import sys

import pytest

from omlx_worker.mac.machine import SAMPLE_SECONDS, Mac, this_system
from omlx_worker.mac.system import System
from tests.helpers.fake_mac import FakeMac


class Clock:
    now = 0.0

    def __call__(self) -> float:
        """A look at the Mac is due at every call."""
        self.now += SAMPLE_SECONDS
        return self.now


def test_the_mac_stays_awake_while_rows_run(mac: FakeMac, system: System) -> None:
    machine = Mac(system)
    for busy in (False, True, True, False, False, True):
        machine.keep_awake(busy)
    assert (mac["asserted"], mac["released"]) == (2, 1)


def test_the_mac_may_sleep_if_the_user_says_so(mac: FakeMac, system: System) -> None:
    Mac(system, allow_sleep=True).keep_awake(True)
    assert mac["asserted"] == 0


def test_as_few_rows_as_memory_pressure_asks_for_but_one(mac: FakeMac, system: System) -> None:
    machine = Mac(system, clock=Clock())
    most = {}
    for mac["pressure"] in (1, 2, 4):
        most[mac["pressure"]] = [machine.most_rows(rows) for rows in (32, 1)]
    assert most == {1: [32, 1], 2: [16, 1], 4: [1, 1]}


def test_nothing_is_claimed_on_battery_only_if_the_user_says_so(
    mac: FakeMac, system: System
) -> None:
    waits, goes_on = Mac(system, only_on_power=True, clock=Clock()), Mac(system)
    assert waits.most_rows(8) == 8
    mac["remaining"] = -1.0
    assert (waits.most_rows(8), goes_on.most_rows(8)) == (0, 8)
    mac["remaining"] = -2.0
    assert waits.most_rows(8) == 8


def test_what_slows_the_mac_is_told(mac: FakeMac, system: System) -> None:
    machine = Mac(system, clock=Clock())
    assert machine.conditions() == []
    mac["remaining"], mac["low_power"], mac["heat"], mac["pressure"] = 600.0, True, 2, 2
    assert machine.conditions() == ["on battery", "low-power mode", "heavy heat", "memory pressure"]
    mac["pressure"], mac["heat"] = 4, 9
    assert machine.conditions()[2:] == ["sleeping heat", "critical memory pressure"]


def test_calls_that_fail_are_told_once_and_change_nothing(
    mac: FakeMac, system: System, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Mac(system, only_on_power=True, clock=Clock())
    mac["status"] = 9
    for _ in range(3):
        machine.keep_awake(True)
        assert (machine.most_rows(8), machine.conditions(), machine.footprint()) == (8, [], 0)
    functions = [record.args[0] for record in caplog.records]
    assert sorted(str(error).partition(" ")[0] for error in functions) == [
        "IOPMAssertionCreateWithName",
        "notify_get_state",
        "proc_pid_rusage",
        "sysctlbyname",
    ]
    mac["status"] = 0
    machine.keep_awake(True)
    mac["status"] = 9
    machine.keep_awake(False)
    assert "IOPMAssertionRelease returned 9" in caplog.text


def test_elsewhere_nothing_is_limited_and_nothing_told() -> None:
    machine = Mac(None, only_on_power=True)
    machine.keep_awake(True)
    machine.keep_awake(False)
    assert (machine.most_rows(8), machine.conditions(), machine.footprint()) == (8, [], 0)


@pytest.mark.skipif(sys.platform == "darwin", reason="has the libraries")
def test_a_mac_without_the_functions_is_used_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert this_system() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert this_system() is None
    assert "cannot be asked about power, heat and memory" in caplog.text
