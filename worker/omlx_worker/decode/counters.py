"""Counts of steps, tokens and drafts: those of a worker, of a job, and of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from omlx_producer.protocol import Speculation
from omlx_worker.engine.interface import Emission


class JudgedStep(Protocol):
    """A step of one row: how many drafts were judged, and how many of them accepted."""

    @property
    def drafted(self) -> int: ...
    @property
    def accepted(self) -> int: ...


@dataclass(slots=True)
class DraftCounts:
    """Sums over the steps of rows. Positions are those of a step's drafts, the first one first.

    Attributes:
        steps: steps, each counted once per row.
        drafted: drafts judged.
        reached: drafts at each position whose predecessors in the step were all accepted.
        accepted: drafts accepted at each position.
    """

    steps: int = 0
    drafted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, step: JudgedStep) -> None:
        self.steps += 1
        if not step.drafted:
            return
        self.drafted += step.drafted
        new = [0] * (step.drafted - len(self.accepted))
        self.reached += new
        self.accepted += new
        for position in range(step.accepted):
            self.accepted[position] += 1
        for position in range(min(step.accepted + 1, step.drafted)):
            self.reached[position] += 1

    def merge(self, other: DraftCounts) -> None:
        self.steps += other.steps
        self.drafted += other.drafted
        self.reached = _sum(self.reached, other.reached)
        self.accepted = _sum(self.accepted, other.accepted)

    @property
    def acceptance(self) -> float:
        """The accepted share of all drafts."""
        return sum(self.accepted) / self.drafted if self.drafted else 0.0

    @property
    def by_position(self) -> list[float]:
        """The accepted share of the drafts at each position that was reached."""
        return [kept / of for kept, of in zip(self.accepted, self.reached, strict=True) if of]

    def to_wire(self) -> Speculation:
        return Speculation(steps=self.steps, drafted=self.drafted, accepted=list(self.accepted))


def _sum(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(some, more, fillvalue=0)]


@dataclass(slots=True)
class Counters:
    """What the engine has done since the worker started. Only the decode thread writes it.

    Attributes:
        batch: rows in the batch now.
        waiting: rows without a place in it, paused ones included.
        steps: decode steps.
        rows: rows summed over the steps.
        tokens: generated tokens.
        prompt_tokens: tokens read, including those read again.
        pauses: how often a row made place for a more urgent one.
    """

    batch: int = 0
    waiting: int = 0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    pauses: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def mean_batch(self) -> float:
        return self.rows / self.steps if self.steps else 0.0

    def stepped(self, rows: int, emissions: Sequence[Emission]) -> None:
        """A step was run for ``rows`` rows and brought these emissions."""
        self.steps += 1
        self.rows += rows
        for emission in emissions:
            self.tokens += len(emission.tokens)
            self.drafts.add(emission)

    def __str__(self) -> str:
        text = f"{self.tokens} tokens in {self.steps} steps, mean batch {self.mean_batch:.1f}"
        drafts = self.drafts
        if not drafts.drafted:
            return text
        places = ", ".join(map(str, drafts.accepted))
        return (
            f"{text}; {drafts.acceptance:.0%} of {drafts.drafted} drafts accepted "
            f"(by position: {places})"
        )
