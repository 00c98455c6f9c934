"""What a depth policy expects of the next step, depth by depth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlook:
    """What each depth promises in the next step.

    Attributes:
        speeds: tokens per second, in an unknown unit if nothing is known.
        seconds: of one step, in the same unit.
        current: the depth in use.
    """

    speeds: list[float]
    seconds: list[float]
    current: int

    @property
    def best(self) -> int:
        """The fastest depth."""
        return max(range(len(self.speeds)), key=self.speeds.__getitem__)

    def share(self, depth: int) -> float:
        """A depth's speed, as a share of that of the depth in use."""
        return self.speeds[depth] / self.speeds[self.current]

    def tokens(self, depth: int) -> float:
        """What a step at a depth brings."""
        return self.speeds[depth] * self.seconds[depth]

    def in_line(self, depth: int) -> float:
        """Seconds of a step as the two depths nearest to it make expect, of three or more."""
        others = sorted(set(range(len(self.seconds))) - {depth}, key=lambda d: abs(d - depth))
        one, two = sorted(others[:2])
        rise = max(self.seconds[two] - self.seconds[one], 0.0) / (two - one)
        return max(self.seconds[one] + rise * (depth - one), self.seconds[one] / 2)

    def price(self, depth: int, steps: int) -> float:
        """Seconds that so many steps at a depth lose against the depth in use."""
        return steps * self.seconds[depth] * max(1 - self.share(depth), 0.0)
