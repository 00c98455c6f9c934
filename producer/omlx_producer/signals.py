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
        drains: whether there is anything to end in order; without it the first signal ends at once.

    Attributes:
        asked: whether there was one; ``at_once`` whether it or another after it ends at once.
        exit_code: 128 + signal of the one that ends at once, else 0.
    """

    def __init__(
        self,
        on_signal: Callable[[], None] | None = None,
        drains: Callable[[], bool] = lambda: True,
    ) -> None:
        self._on_signal = on_signal or self._interrupt
        self._drains = drains
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
        self.asked, self.at_once = True, self.asked or not self._drains()
        if self.at_once:
            self.exit_code = 128 + number
        self._on_signal()

    def _interrupt(self) -> None:
        if self.at_once:
            raise KeyboardInterrupt
