"""How drafts fared: counted for a job and for the worker alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx_producer.protocol import Speculation
from omlx_worker.engine.interface import Emission


@dataclass(slots=True)
class DraftCounts:
    """Sums over the steps of rows.

    Attributes:
        steps: steps of single rows.
        drafted: drafts judged.
        accepted: drafts accepted at each position of a window, the first one first.
    """

    steps: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, emission: Emission) -> None:
        self.steps += 1
        self.drafted += emission.drafted
        self.accepted += [0] * (emission.drafted - len(self.accepted))
        for position in range(emission.accepted):
            self.accepted[position] += 1

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    def to_wire(self) -> Speculation:
        return Speculation(steps=self.steps, drafted=self.drafted, accepted=list(self.accepted))
