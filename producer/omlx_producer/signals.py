"""SIGINT and SIGTERM: the first asks for an orderly end, the second for an end at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class StopSignals:
    """Counts the stop signals of this process.

    Args:
        on_signal: called after each signal, in the signal handler. By default the second signal
            raises KeyboardInterrupt.

    Attributes:
        exit_code: 128 + signal after the second signal, else 0.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self._on_signal = on_signal or self._interrupt
        self._count = 0
        self.exit_code = 0

    @property
    def asked(self) -> bool:
        return self._count > 0

    @property
    def at_once(self) -> bool:
        return self._count > 1

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catch the signals inside the block. Python allows that on the main thread only."""
        previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                previous[number] = signal.signal(number, lambda number, _: self.receive(number))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def receive(self, number: int) -> None:
        """Handle a signal, or a command that means the same."""
        self._count += 1
        if self.at_once:
            self.exit_code = 128 + number
        self._on_signal()

    def _interrupt(self) -> None:
        if self.at_once:
            raise KeyboardInterrupt
