"""Calls of macOS, against libraries with the signatures of Apple's headers."""

from __future__ import annotations

import pytest

from omlx_worker.mac.system import System
from tests.helpers.fake_mac import FakeMac

GIB = 2**30


def test_levels_and_bytes_are_read_as_macos_tells_them(mac: FakeMac, system: System) -> None:
    mac["pressure"], mac["heat"], mac["footprint"] = 4, 2, 200 * GIB
    assert (system.memory_pressure(), system.heat(), system.footprint()) == (4, 2, 200 * GIB)


@pytest.mark.parametrize(("remaining", "on_battery"), [(-2.0, False), (-1.0, True), (5400.0, True)])
def test_a_battery_of_unknown_charge_is_one(
    mac: FakeMac, system: System, remaining: float, on_battery: bool
) -> None:
    mac["remaining"] = remaining
    assert system.on_battery() is on_battery


def test_low_power_mode_is_one_byte(mac: FakeMac, system: System) -> None:
    assert system.low_power() is False
    mac["low_power"] = True
    assert system.low_power() is True


def test_the_assertion_is_against_idle_sleep_and_names_the_worker(
    mac: FakeMac, system: System
) -> None:
    held = system.stay_awake()
    assert (mac["kind"], mac["asserted"]) == (b"PreventUserIdleSystemSleep", 1)
    assert b"omlx-worker" in mac["why"]
    system.let_sleep(held)
    assert mac["released"] == 1


def test_a_call_that_fails_is_named(mac: FakeMac, system: System) -> None:
    mac["status"] = 9
    for call in (system.memory_pressure, system.footprint, system.heat, system.stay_awake):
        with pytest.raises(OSError, match=r"^\w+ returned 9$"):
            call()


def test_only_libraries_of_the_system_are_opened(mac: FakeMac, system: System) -> None:
    assert mac.opened
    assert all(path.startswith(("/usr/lib/", "/System/Library/")) for path in mac.opened)
