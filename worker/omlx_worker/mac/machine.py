"""The Mac that a worker runs on: how much it may do now, what slows it, when it may sleep."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from omlx_worker.mac.system import System

log = logging.getLogger("omlx_worker.mac")

SAMPLE_SECONDS = 1.0

_HEATS = "nominal", "moderate", "heavy", "trapping", "sleeping"
_NORMAL, _WARNING, _CRITICAL = 1, 2, 4

T = TypeVar("T")


def this_system() -> System | None:
    """macOS, or None elsewhere."""
    if sys.platform != "darwin":
        return None
    try:
        return System()
    except (OSError, AttributeError) as error:
        log.warning("macOS cannot be asked about power, heat and memory: %s", error)
        return None


class Mac:
    """What a worker minds of its Mac. A call that fails is logged once, and tried again.

    The assertion against sleep is IOKit's and not a child process with `caffeinate`: it ends with
    this process however that ends, there is no child to leak or to be killed, and a process with
    a model in memory need not fork each time that rows come.

    `footprint` may be called from any thread, the rest from one.

    Args:
        system: None if this is no Mac. Then nothing is limited.
        allow_sleep: let it sleep while rows run.
        only_on_power: claim nothing on battery.
    """

    def __init__(
        self,
        system: System | None,
        *,
        allow_sleep: bool = False,
        only_on_power: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._system = system
        self._allow_sleep = allow_sleep
        self._only_on_power = only_on_power
        self._clock = clock
        self._look_at = float("-inf")
        self._pressure, self._on_battery = _NORMAL, False
        self._held: int | None = None
        self._told: set[str] = set()

    def keep_awake(self, busy: bool) -> None:
        """Keep the machine from idle sleep while rows run."""
        if self._allow_sleep:
            return
        if busy and self._held is None:
            self._held = self._ask(lambda mac: mac.stay_awake(), None)
        elif not busy and self._held is not None:
            held, self._held = self._held, None
            self._ask(lambda mac: mac.let_sleep(held), None)

    def most_rows(self, rows: int) -> int:
        """The most rows that jobs may be claimed for now, of ``rows``; 0 while none may be.

        Half of them under memory pressure and one if that is critical, but one always: the
        model itself may be what presses.
        """
        self._look()
        if self._only_on_power and self._on_battery:
            return 0
        if self._pressure >= _CRITICAL:
            return 1
        return max(1, rows // 2) if self._pressure >= _WARNING else rows

    def conditions(self) -> list[str]:
        """What is not as it should be, for people."""
        self._look()
        heat = self._ask(lambda mac: mac.heat(), 0)
        found = {
            "on battery": self._on_battery,
            "low-power mode": self._ask(lambda mac: mac.low_power(), False),
            f"{_HEATS[min(heat, 4)]} heat": heat,
            "memory pressure": self._pressure == _WARNING,
            "critical memory pressure": self._pressure >= _CRITICAL,
        }
        return [text for text, holds in found.items() if holds]

    def footprint(self) -> int:
        """Bytes of this process as macOS counts them; 0 if it does not tell."""
        return self._ask(lambda mac: mac.footprint(), 0)

    def _look(self) -> None:
        if self._clock() >= self._look_at:
            self._look_at = self._clock() + SAMPLE_SECONDS
            self._pressure = self._ask(lambda mac: mac.memory_pressure(), _NORMAL)
            self._on_battery = self._ask(lambda mac: mac.on_battery(), False)

    def _ask(self, call: Callable[[System], T], otherwise: T) -> T:
        if self._system is None:
            return otherwise
        try:
            return call(self._system)
        except OSError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
                log.warning("a call of macOS failed (%s); the worker goes on without it", error)
            return otherwise
