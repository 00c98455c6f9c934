"""A clock for tests."""

from __future__ import annotations


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now
