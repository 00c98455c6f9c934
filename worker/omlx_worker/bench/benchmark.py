"""`omlx-worker bench`: one model, some numbers of rows, each depth and `auto`, beside mlx-lm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from omlx_worker.bench.laps import Measured, Plan, measure
from omlx_worker.bench.prompts import heldout_prompts
from omlx_worker.bench.report import in_rows
from omlx_worker.bench.sides import AUTO, BatchGeneratorSide, DecoderSide, Side, StreamSide
from omlx_worker.decode.budget import MemoryBudget, in_units
from omlx_worker.decode.depth.fixed import AutoPolicy
from omlx_worker.engine.engine import Decoder
from omlx_worker.engine.footprint import budget
from omlx_worker.engine.loader import DEMO, decoder_of, load, resolve
from omlx_worker.engine.models.families import as_ragged

DEEPEST = 3
"""Drafts a step that are tried by default, and that `auto` may choose."""


class BenchError(Exception):
    """The options cannot be measured. The message is one sentence for the user."""


@dataclass(frozen=True)
class Options(Plan):
    """What to measure.

    Attributes:
        model: ``demo``, a folder, or a Hugging Face id.
        rows: numbers of rows that decode at the same time.
        depths: drafts a step, or ``auto``; None for all that the model can do.
        context: prompt tokens of each row.
    """

    model: str = DEMO
    rows: tuple[int, ...] = (1, 4, 8, 16)
    depths: tuple[int | str, ...] | None = None
    context: int = 64


class Benchmark:
    """A loaded model, and the sides to measure it with.

    Raises, when it is made:
        ModelError: if there is no such model or its files cannot be used.
        BenchError: if the model has no head for the drafts asked for, or the rows do not fit.

    Attributes:
        figures: the figures so far, in the order of the table.
        dtype, weight_bytes: of the weights.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.figures: list[Measured] = []
        self._network, self._tokenizer, _ = load(resolve(options.model))
        self.dtype = precision(self._network)
        self._depths = self._possible_depths()
        self._require_memory()

    def run(self) -> Iterator[str]:
        """Measure; yields the progress after every turn of a side."""
        prompts = heldout_prompts(self._tokenizer, self.options.context, max(self.options.rows))
        theirs: list[Side] = [BatchGeneratorSide(self._network), StreamSide(self._network)]
        own = [self._own_side(depth) for depth in self._depths]
        settings = [(n, [*theirs[: 1 + (n == 1)], *own]) for n in self.options.rows]
        turns = sum(len(sides) for _, sides in settings) * (self.options.laps + 1)
        done = itertools.count(1)
        try:
            for rows, sides in settings:
                before = list(self.figures)
                for line, name in measure(sides, prompts[:rows], self.options):
                    self.figures = before + line
                    yield f"{in_rows(rows)}, {name}: {next(done)} of {turns} laps done"
        finally:
            # MLX aborts a process that ends while its device is at work.
            mx.synchronize()

    def _possible_depths(self) -> list[int | str]:
        ragged = as_ragged(self._network)
        has_head = ragged is not None and ragged.drafts
        if self.options.depths is None:
            return [*range(DEEPEST + 1), AUTO] if has_head else [0]
        for depth in self.options.depths:
            if depth and not has_head:
                raise BenchError(
                    f"--depths: got {depth}, but {self.options.model} has no MTP head to draft "
                    "with; measure depth 0 alone"
                )
        return list(self.options.depths)

    def _require_memory(self) -> None:
        options = self.options
        deepest = max((DEEPEST if d == AUTO else int(d) for d in self._depths), default=0)
        decoder = self._decoder(deepest)
        self.weight_bytes = decoder.weight_bytes
        memory = MemoryBudget(budget(), self.weight_bytes, decoder.bytes_for)
        longest = options.context + 2 * options.tokens + (DEEPEST + 1) * options.learn
        row = [(options.context, longest)]
        rows = min((rows for rows in options.rows if not memory.fits(row * rows)), default=0)
        if not rows:
            return
        most = next((n for n in range(rows, 0, -1) if memory.fits(row * n)), 0)
        raise BenchError(
            f"--rows: {rows} rows of up to {longest} tokens take "
            f"{in_units(decoder.bytes_for(row * rows))} beside the model's "
            f"{in_units(self.weight_bytes)}, and there are {in_units(memory.limit)} for both; "
            + (f"measure at most {most}" if most else "take a smaller model or --context")
        )

    def _own_side(self, depth: int | str) -> DecoderSide:
        if depth == AUTO:
            return DecoderSide(self._decoder(DEEPEST), AUTO, AutoPolicy(DEEPEST))
        return DecoderSide(self._decoder(int(depth)), f"K={depth}")

    def _decoder(self, depth: int) -> Decoder:
        return decoder_of(self._network, max(self.options.rows), depth)


def precision(network: nn.Module) -> str:
    """The type of a network's weights, or the bits that they are quantized to."""
    for layer in network.modules():
        if isinstance(layer, nn.QuantizedLinear):
            return f"{layer.bits} bits"
    found = {str(weight.dtype) for _, weight in tree_flatten(network.parameters())}
    return ", ".join(sorted(name.removeprefix("mlx.core.") for name in found))
