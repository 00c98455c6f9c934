"""Laps: all sides take turns, so that other load on the machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, Side, Step
from omlx_worker.engine.interface import Sampling

T = TypeVar("T")

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Plan:
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
    sampling: Sampling = GREEDY


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
    sampling: Sampling = GREEDY
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

    def add(self, steps: Sequence[Step], seconds: float) -> None:
        """Count the steps of a lap."""
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

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.laps)

    @property
    def ms_per_step(self) -> float:
        return 1000 * self.seconds / self.steps

    @property
    def tokens_per_step(self) -> float:
        """Of each row."""
        return self.tokens / self.row_steps

    @property
    def accepted(self) -> list[float]:
        """The share of drafts accepted at each place."""
        return [self.kept[place] / self.judged[place] for place in sorted(self.judged)]

    @property
    def depth(self) -> int:
        """The depth of most steps."""
        return self.depths.most_common(1)[0][0]

    def to_json(self) -> dict[str, Any]:
        """The figures as files in `docs/benchmarks/results` have them."""
        flat = {**vars(self), "accepted": self.accepted}
        sampling = flat.pop("sampling")
        for name in ("judged", "kept", "depths"):
            flat[name] = dict(sorted(flat[name].items()))
        rule = "ratio" if sampling.ratio else "coupled"
        return {**flat, "temperature": sampling.temperature, "rule": rule}


def lap(side: Side, prompts: Sequence[list[int]], into: Measured, settle: int, tokens: int) -> None:
    """Run ``settle`` steps that do not count, then as many as make ``tokens`` tokens a row."""
    mx.clear_cache()
    held = mx.get_active_memory()
    with closing(side.decode(prompts, into.sampling)) as decoding:
        for _ in range(settle):
            next(decoding)
        mx.reset_peak_memory()
        steps: list[Step] = []
        left = tokens * len(prompts)
        began = time.perf_counter()
        while left > 0:
            step = next(decoding)
            left -= len(step) + sum(accepted for _, accepted in step)
            steps.append(step)
        into.add(steps, time.perf_counter() - began)
        into.peak = max(into.peak, mx.get_peak_memory() - held)


def in_turn(sides: Sequence[T], lap: int) -> list[T]:
    """The sides in the order of a lap. The order changes with each lap, so that no side always
    follows the same other or is always last."""
    first = lap // 2 % max(len(sides), 1)
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if lap % 2 else order


def measure(
    sides: Sequence[Side], prompts: Sequence[list[int]], plan: Plan
) -> Iterator[tuple[list[Measured], str]]:
    """Measure all sides with these prompts, in turns.

    A side that fails drops out, with the error in its figures, and the others go on.

    Yields:
        The figures so far, and the side that ran, after each side's turn.
    """
    setting = (len(prompts), len(prompts[0]), plan.sampling)
    line = [Measured(side.name, *setting) for side in sides]
    for number in range(plan.laps + 1):
        for side, measured in in_turn(list(zip(sides, line, strict=True)), number):
            if measured.failed:
                continue
            try:
                if number:
                    lap(side, prompts, measured, plan.settle, plan.tokens)
                else:
                    # Compiles, and `auto` learns; not counted.
                    steps = plan.learn if side.name == AUTO else plan.settle
                    lap(side, prompts, Measured(side.name, *setting), steps, 1)
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                measured.failed = one_line(f"{type(error).__name__}: {error}")
            _compare(line)
            yield line, side.name


def _compare(line: Sequence[Measured]) -> None:
    base = next((measured for measured in line if measured.side == BATCH_GENERATOR), line[0])
    for measured in line:
        measured.ratios = [a / b for a, b in zip(measured.laps, base.laps, strict=False)]
