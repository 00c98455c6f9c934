"""SIGINT and SIGTERM: the first asks for a drain, the second for a stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class StopSignals:
    """How often this process was told to stop.

    Args:
        on_stop: called each time, in a signal handler.

    Attributes:
        exit_code: 128 + signal once it was told twice, else 0.
    """

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._count = 0
        self._previous: dict[signal.Signals, Any] = {}
        self.exit_code = 0

    @property
    def drain(self) -> bool:
        return self._count > 0

    @property
    def at_once(self) -> bool:
        return self._count > 1

    def install(self) -> None:
        """Handle both signals; elsewhere than on the main thread Python does not allow that."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, lambda number, _: self.told(number))

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def told(self, signum: int) -> None:
        self._count += 1
        if self.at_once:
            self.exit_code = 128 + signum
        self._on_stop()
