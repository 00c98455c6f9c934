"""One setting of the benchmark: all sides in turns, a lap each, and what came of it."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from omlx_worker.bench.laps import in_turn
from scripts.bench.sides import MlxLmBatch, Prompt, Ragged, Side

BASE = MlxLmBatch.name

FIRST_TOKENS = 8
"""Of a lap that only compiles."""


@dataclass
class Measured:
    """One side at one setting.

    Attributes:
        laps: tokens per second of all rows together, a lap each.
        ratios: of those to `BatchGenerator`'s in the same lap, or the first side's without it.
        steps: of all laps, and ``seconds`` they took.
        peak: most bytes in use while decoding, without what the benchmark itself holds.
        own: bytes that the rows' caches come to when a lap ends, each held once.
        depths: steps by the drafts that they verified, all laps together.
        failed: the error that ended this side's laps, if one did.
    """

    side: str
    rows: int
    context: int
    temperature: float
    rule: str
    laps: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    peak: int = 0
    own: int = 0
    row_steps: int = 0
    kept: list[int] = field(default_factory=lambda: [0] * 8)
    depths: dict[int, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def accepted(self) -> list[float]:
        """The share of drafts accepted at each place, of those whose predecessors were."""
        judged = [self.row_steps, *self.kept]
        return [kept / before for before, kept in zip(judged, self.kept, strict=False) if kept]

    def __str__(self) -> str:
        head = (
            f"rows {self.rows:2} context {self.context:5} T {self.temperature:g} {self.rule:7} "
            f"{self.side:15}"
        )
        if not self.laps:
            return f"{head} failed: {self.failed}"
        ratios = ""
        if self.ratios:
            middle, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
            ratios = f"{middle:5.2f} ({low:.2f}-{high:.2f})"
        return (
            f"{head} {statistics.median(self.laps):8.1f} tok/s "
            f"{1000 * self.seconds / self.steps:7.2f} ms/step {ratios} "
            f"peak {self.peak / 1e9:.2f} GB {self.peak / max(self.own, 1):.2f} of own "
            + " ".join(f"{share:.2f}" for share in self.accepted)
            + (f" depths {self.depths}" if len(self.depths) > 1 else "")
        )


def lap(side: Side, prompts: Sequence[Prompt], into: Measured, settle: int, tokens: int) -> None:
    """Decode ``settle`` tokens a row that do not count, then ``tokens`` that do."""
    mx.clear_cache()
    held = mx.get_active_memory()
    side.start(prompts, into.temperature, into.rule)
    produced = 0
    while produced < settle * len(prompts):
        produced += side.step()
    mx.reset_peak_memory()
    if isinstance(side, Ragged):
        side.forget()
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
    into.own = sum(prompt.bytes_after(settle + tokens, side.layers) for prompt in prompts)
    if isinstance(side, Ragged):
        into.row_steps += side.drafting.row_steps
        into.kept = [a + b for a, b in zip(into.kept, side.drafting.accepted, strict=True)]
        for depth, count in side.depths.items():
            into.depths[depth] = into.depths.get(depth, 0) + count
    side.stop()


def measure(
    sides: Sequence[Side],
    prompts: Sequence[Prompt],
    line: Sequence[Measured],
    args: Any,
    keep: Callable[[], None],
) -> None:
    """All sides at one setting, in turns; ``line`` takes what comes of each.

    A side that fails drops out and the others go on.

    Args:
        keep: called whenever there is something new.
    """
    running = list(zip(sides, line, strict=True))
    for number in range(-1, args.laps):
        for side, measured in in_turn(running, number):
            try:
                if number < 0:
                    _prepare(side, prompts, measured, args)
                else:
                    lap(side, prompts, measured, args.settle, args.tokens)
            except (RuntimeError, ValueError) as error:
                measured.failed = f"{type(error).__name__}: {error}"
                running.remove((side, measured))
                with contextlib.suppress(RuntimeError, ValueError):
                    side.stop()
            _compare(line)
            keep()
    for measured in line:
        print(measured, file=sys.stderr, flush=True)


def _prepare(side: Side, prompts: Sequence[Prompt], like: Measured, args: Any) -> None:
    """Compile; `auto` then finds out what depths cost and what the model's drafts are worth."""
    setting = (side.name, like.rows, like.context, like.temperature, like.rule)
    lap(side, prompts, Measured(*setting), 0, FIRST_TOKENS)
    if side.name == "auto":
        for _ in range(args.learn):
            lap(side, prompts, Measured(*setting), args.settle, args.tokens)


def _compare(line: Sequence[Measured]) -> None:
    base = next((measured for measured in line if measured.side == BASE), line[0])
    for measured in line:
        measured.ratios = [a / b for a, b in zip(measured.laps, base.laps, strict=False)]
