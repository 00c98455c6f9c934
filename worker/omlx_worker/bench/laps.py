"""Laps: all sides take turns, so that other load on the machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from omlx_producer.errors import one_line
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, GREEDY, Drafting, Side
from omlx_worker.engine.interface import Sampling

T = TypeVar("T")


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
        return self.tokens / self.drafting.row_steps

    def to_json(self) -> dict[str, Any]:
        """The figures as files in `docs/benchmarks/results` have them."""
        flat = {**vars(self), **vars(self.drafting), "accepted": self.drafting.accepted}
        del flat["drafting"], flat["sampling"]
        for name in ("judged", "kept", "depths"):
            flat[name] = dict(sorted(flat[name].items()))
        rule = "ratio" if self.sampling.ratio else "coupled"
        return {**flat, "temperature": self.sampling.temperature, "rule": rule}


def lap(side: Side, prompts: Sequence[list[int]], into: Measured, settle: int, tokens: int) -> None:
    """Run ``settle`` steps that do not count, then as many as make ``tokens`` tokens a row."""
    mx.clear_cache()
    held = mx.get_active_memory()
    side.drafting = Drafting()
    side.start(prompts, into.sampling)
    for _ in range(settle):
        side.step()
    mx.reset_peak_memory()
    side.drafting = into.drafting
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
    into.peak = max(into.peak, mx.get_peak_memory() - held)
    side.stop()


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
                with suppress(RuntimeError, ValueError):
                    side.stop()
            _compare(line)
            yield line, side.name


def _compare(line: Sequence[Measured]) -> None:
    base = next((measured for measured in line if measured.side == BATCH_GENERATOR), line[0])
    for measured in line:
        measured.ratios = [a / b for a, b in zip(measured.laps, base.laps, strict=False)]
