"""Laps: all sides take turns, so that other load on the machine slows all of them alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, Side, Step
from omlx_worker.engine.rows.request import Sampling

T = TypeVar("T")


@dataclass(frozen=True)
class LapPlan:
    """How long sides run.

    Attributes:
        tokens: that each row decodes in a lap, at least.
        settle: steps of a lap before its clock starts.
        learn: steps of `auto` before the first lap; it measures depths in them.
    """

    laps: int = 2
    tokens: int = 32
    settle: int = 3
    learn: int = 80
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0))


@dataclass
class Measured:
    """One side with a number of rows.

    Attributes:
        laps: tokens per second of all rows together, a lap each.
        ratios: of those to the same lap of `BatchGenerator`, or of the first side without it.
        steps, seconds, tokens: of all laps.
        row_steps: steps, each counted once for every row.
        judged: drafts at each place, the first one 0, in steps that accepted all before it.
        kept: those of them that were accepted.
        depths: steps by the largest number of drafts judged for a row.
        peak: most bytes in use while decoding, beyond those in use before the lap.
        failed: the error that ended this side's laps, if one did.
    """

    side: str
    rows: int
    context: int
    laps: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    row_steps: int = 0
    judged: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    peak: int = 0
    failed: str = ""

    def add(self, steps: Sequence[Step], seconds: float, peak: int) -> None:
        """Count a lap."""
        tokens = 0
        for step in steps:
            self.row_steps += len(step)
            self.depths[max((drafted for drafted, _ in step), default=0)] += 1
            for drafted, accepted in step:
                tokens += 1 + accepted
                self.judged.update(range(min(accepted + 1, drafted)))
                self.kept.update(range(accepted))
        self.laps.append(tokens / seconds)
        self.steps += len(steps)
        self.seconds += seconds
        self.tokens += tokens
        self.peak = max(self.peak, peak)

    @property
    def accepted(self) -> list[float]:
        """The share of drafts accepted at each place."""
        return [self.kept[place] / self.judged[place] for place in sorted(self.judged)]

    @property
    def depth(self) -> int:
        """The depth of most steps."""
        return self.depths.most_common(1)[0][0]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "accepted": self.accepted}


def lap(side: Side, prompts: Sequence[list[int]], plan: LapPlan) -> tuple[list[Step], float, int]:
    """Run a side until its rows together have their tokens, the steps that settle it not counted.

    Returns:
        The steps, the seconds that they took, and the most bytes in use meanwhile beyond those
        in use before.
    """
    mx.clear_cache()
    held = mx.get_active_memory()
    with closing(side.decode(prompts, plan.sampling)) as decoding:
        for _ in range(plan.settle):
            next(decoding)
        mx.reset_peak_memory()
        steps: list[Step] = []
        left = plan.tokens * len(prompts)
        began = time.perf_counter()
        while left > 0:
            step = next(decoding)
            left -= len(step) + sum(accepted for _, accepted in step)
            steps.append(step)
        return steps, time.perf_counter() - began, mx.get_peak_memory() - held


def in_turn(sides: Sequence[T], lap: int) -> list[T]:
    """The sides in the order of a lap. The order changes with each lap, so that no side always
    follows the same other or is always last."""
    first = lap // 2 % max(len(sides), 1)
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if lap % 2 else order


def measure(
    sides: Sequence[Side], prompts: Sequence[list[int]], plan: LapPlan
) -> Iterator[tuple[list[Measured], str]]:
    """Measure all sides with these prompts, in turns.

    A side that fails drops out, with the error in its figures, and the others go on.

    Yields:
        The figures so far, and the side that ran, after each side's turn.
    """
    line = [Measured(side.name, len(prompts), len(prompts[0])) for side in sides]
    base = next((measured for measured in line if measured.side == BATCH_GENERATOR), line[0])
    warm = replace(plan, tokens=1)
    learning = replace(warm, settle=plan.learn)
    for number in range(plan.laps + 1):
        for side, measured in in_turn(list(zip(sides, line, strict=True)), number):
            if measured.failed:
                continue
            try:
                if number:
                    measured.add(*lap(side, prompts, plan))
                else:
                    # Compiles, and `auto` learns; not counted.
                    lap(side, prompts, learning if side.name == AUTO else warm)
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                measured.failed = one_line(f"{type(error).__name__}: {error}")
            for each in line:
                each.ratios = [a / b for a, b in zip(each.laps, base.laps, strict=False)]
            yield line, side.name
