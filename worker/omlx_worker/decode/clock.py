"""How long decode steps take."""

from __future__ import annotations

import time

TRACED_STEPS = 2
"""Steps without a usable time after a trace. The traced one is slow; the next allocates memory."""


class StepClock:
    """Times decode steps, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self._ended_at = 0.0
        self._untimed = 1

    def interrupt(self, steps: int = 1) -> None:
        """Something other than steps takes time: the next ``steps`` have none."""
        self._untimed = max(self._untimed, steps)

    def step(self) -> float | None:
        """A step has ended; returns the seconds since the one before, if it alone took them."""
        now, before = time.monotonic(), self._ended_at
        alone = not self._untimed
        self._ended_at, self._untimed = now, max(0, self._untimed - 1)
        return now - before if alone else None
