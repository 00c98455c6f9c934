"""Laps: all sides in turns, so that other load on the machine affects all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, Drafting, Side

T = TypeVar("T")

SETTLING_STEPS = 3
"""Steps of every lap before its clock starts."""

LEARNING_STEPS = 80
"""Steps in which `auto` measures costs and acceptance."""


@dataclass
class Measured:
    """A side with a number of rows.

    Attributes:
        laps: tokens per second of all rows together, for each lap.
        ratios: of `laps` to `BatchGenerator`'s in the same lap; empty if that cannot run.
        steps, seconds, tokens: sums over all laps.
        drafting: the drafts of all laps.
        peak: most bytes in use while decoding, minus those in use before the lap.
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
    drafting: Drafting = field(default_factory=Drafting)
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
        return self.tokens / self.drafting.counts.steps

    @property
    def depth(self) -> int:
        """The depth of most steps."""
        depths = self.drafting.depths
        return depths.most_common(1)[0][0] if depths else 0


def lap(side: Side, prompts: Sequence[list[int]], into: Measured, settle: int, tokens: int) -> None:
    """Run ``settle`` steps that do not count, then steps for ``tokens`` tokens per row."""
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
    into.laps.append(produced / seconds)
    into.steps += steps
    into.seconds += seconds
    into.tokens += produced
    into.drafting.merge(side.take_drafting())
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
