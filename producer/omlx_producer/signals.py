"""SIGINT and SIGTERM: the first asks for an orderly end, the second for an end at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class StopSignals:
    """The stop signals of this process.

    Args:
        on_signal: called after each signal, in the signal handler. By default the second signal
            raises KeyboardInterrupt.

    Attributes:
        asked: whether there was one; ``at_once`` whether there was another after it.
        exit_code: 128 + signal after the second signal, else 0.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self._on_signal = on_signal or self._interrupt
        self.asked = self.at_once = False
        self.exit_code = 0

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
        self.asked, self.at_once = True, self.asked
        if self.at_once:
            self.exit_code = 128 + number
        self._on_signal()

    def _interrupt(self) -> None:
        if self.at_once:
            raise KeyboardInterrupt
