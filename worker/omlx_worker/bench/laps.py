"""Laps: all sides in turns, so that what else the machine is doing falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, Side

T = TypeVar("T")

SETTLING_STEPS = 3
"""Of every lap, before its clock starts."""

LEARNING_STEPS = 80
"""In which `auto` finds out what depths cost and what is accepted."""


@dataclass
class Measured:
    """One side with so many rows.

    Attributes:
        laps: tokens per second of all rows together, a lap each.
        ratios: of those to `BatchGenerator`'s in the same lap; empty where that cannot run.
        steps, seconds, tokens: of all laps.
        row_steps: steps, each counted once for every row.
        judged, kept, depths: see `Drafting`.
        peak: most bytes in use while decoding, beyond those in use before the lap.
        failed: the error that ended this side's laps, if one did.
    """

    side: str
    rows: int
    context: int
    temperature: float = 0.0
    rule: str = "coupled"
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
        return self.depths.most_common(1)[0][0] if self.depths else 0


def lap(side: Side, prompts: Sequence[list[int]], into: Measured, settle: int, tokens: int) -> None:
    """Run ``settle`` steps that do not count, then as many as make ``tokens`` tokens a row."""
    mx.clear_cache()
    held = mx.get_active_memory()
    side.start(prompts)
    for _ in range(settle):
        side.step()
    mx.reset_peak_memory()
    side.take_drafting()
    produced = steps = 0
    began = time.perf_counter()
    while produced < tokens * len(prompts):
        produced += side.step()
        steps += 1
    seconds = time.perf_counter() - began
    drafting = side.take_drafting()
    into.laps.append(produced / seconds)
    into.steps += steps
    into.seconds += seconds
    into.tokens += produced
    into.row_steps += drafting.row_steps
    into.judged += drafting.judged
    into.kept += drafting.kept
    into.depths += drafting.depths
    into.peak = max(into.peak, mx.get_peak_memory() - held)
    side.stop()


def in_turn(sides: Sequence[T], lap: int) -> list[T]:
    """The sides in the order of a lap, another one each, so that no side always comes after the
    same other, nor last of all."""
    first = lap // 2 % max(len(sides), 1)
    order = [*sides[first:], *sides[:first]]
    return order[::-1] if lap % 2 else order


def measure(
    sides: Sequence[Side], prompts: Sequence[list[int]], laps: int, tokens: int
) -> Iterator[tuple[list[Measured], str]]:
    """Measure all sides with these prompts, in turns.

    A side that fails drops out, with the error in its figures, and the others go on.

    Yields:
        What there is so far, and the side that ran, after each side's turn.
    """
    line = [Measured(side.name, len(prompts), len(prompts[0])) for side in sides]
    for number in range(laps + 1):
        for side, measured in in_turn(list(zip(sides, line, strict=True)), number):
            if measured.failed:
                continue
            try:
                if number:
                    lap(side, prompts, measured, SETTLING_STEPS, tokens)
                else:
                    _prepare(side, prompts)
            except (RuntimeError, ValueError, TypeError, MemoryError) as error:
                measured.failed = one_line(f"{type(error).__name__}: {error}")
                with suppress(RuntimeError):
                    side.stop()
            _compare(line)
            yield line, side.name


def _prepare(side: Side, prompts: Sequence[list[int]]) -> None:
    """A lap that is not counted: it compiles, and `auto` learns in it."""
    steps = LEARNING_STEPS if side.name == AUTO else SETTLING_STEPS
    lap(side, prompts, Measured(side.name, len(prompts), len(prompts[0])), steps, 1)


def _compare(line: Sequence[Measured]) -> None:
    for base in line:
        if base.side == BATCH_GENERATOR and base.laps:
            for measured in line:
                measured.ratios = [a / b for a, b in zip(measured.laps, base.laps, strict=False)]
