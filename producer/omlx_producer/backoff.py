"""How long to wait before trying again, while something stays away."""

from __future__ import annotations

import time
from random import SystemRandom


class Backoff:
    """Pauses that double with every failure in a row, and are not the same in any two processes.

    Args:
        first: seconds, of the first pause.
        longest: seconds; pauses are spread by half to either side.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._pause = first
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Since the first failure in the row; 0 where there is none. From any thread."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def next(self) -> float:
        """It failed once more: the seconds to wait now."""
        if self._since is None:
            self._since = time.monotonic()
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause * SystemRandom().uniform(0.5, 1.5)

    def reset(self) -> None:
        """It did not fail."""
        self._since, self._pause = None, self._first
