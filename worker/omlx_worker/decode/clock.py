"""How long decode steps take."""

from __future__ import annotations

import time

TRACED_STEPS = 2
"""Steps without a usable time after a trace. The traced one is slow; the next allocates memory."""


class StepClock:
    """Times decode steps, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self._ended_at: float | None = None
        self._mixed_steps = 0

    def interrupt(self) -> None:
        """Something other than steps and chunks takes time: the next step has none."""
        self._ended_at = None

    def chunk(self) -> None:
        """A chunk of a prompt is read before the next step."""
        self._mixed_steps = max(self._mixed_steps, 1)

    def traced(self) -> None:
        """The step that ends now was traced, or rows were moved in it."""
        self._mixed_steps = TRACED_STEPS

    def step(self) -> tuple[float | None, bool]:
        """A step has ended.

        Returns:
            Seconds since the one before, None without one, and whether a step alone took them.
        """
        now, before = time.monotonic(), self._ended_at
        alone = before is not None and not self._mixed_steps
        self._ended_at, self._mixed_steps = now, max(0, self._mixed_steps - 1)
        return (None if before is None else now - before), alone
