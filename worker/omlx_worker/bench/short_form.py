"""The short form: one model, some numbers of rows, every depth and `auto`, beside mlx-lm."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from omlx_worker.bench.laps import LEARNING_STEPS, Measured, measure
from omlx_worker.bench.report import in_rows
from omlx_worker.bench.sides import (
    AUTO,
    BatchGeneratorSide,
    DecoderSide,
    Side,
    StreamSide,
)
from omlx_worker.decode.budget import MemoryBudget, in_units
from omlx_worker.decode.depth.fixed import AutoPolicy
from omlx_worker.engine.engine import Decoder
from omlx_worker.engine.footprint import budget
from omlx_worker.engine.generator import GeneratorDecoder
from omlx_worker.engine.loader import DEMO, load, resolve
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder

COUNTS = ("judged", "kept", "depths")
DEEPEST = 3
"""Drafts a step that are tried unless others are asked for, and that `auto` may choose."""


class BenchError(Exception):
    """What was asked for cannot be measured. The message is one sentence for the user."""


@dataclass(frozen=True)
class Wanted:
    """What to measure.

    Attributes:
        model: ``demo``, a folder, or a Hugging Face id.
        rows: numbers of rows that decode at the same time.
        depths: drafts a step, or ``auto``; None for all that the model can do.
        context: prompt tokens of each row.
        tokens: that each row decodes in a lap.
    """

    model: str = DEMO
    rows: tuple[int, ...] = (1, 4, 8, 16)
    depths: tuple[int | str, ...] | None = None
    context: int = 64
    tokens: int = 32
    laps: int = 2


class ShortForm:
    """A loaded model and everything that is to be measured of it.

    Raises, when it is made:
        ModelError: if there is no such model or its files cannot be used.
        BenchError: if the model has no head for the drafts asked for, or the rows do not fit.

    Attributes:
        figures: what was measured, complete or not, in the order of the table.
        laps_in_all: turns of all sides that `run` will take.
        has_head: whether the model can draft.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.figures: list[Measured] = []
        self._network, self._tokenizer, _ = load(resolve(wanted.model))
        ragged = as_ragged(self._network)
        self.has_head = ragged is not None and ragged.drafts
        self.weight_bytes = ragged.weight_bytes if ragged else _bytes_of(self._network)
        self._depths = self._possible(wanted.depths)
        self._require_room()

    @property
    def laps_in_all(self) -> int:
        sides = sum(1 + (rows == 1) + len(self._depths) for rows in self.wanted.rows)
        return sides * (self.wanted.laps + 1)

    @property
    def dtype(self) -> str:
        """The precision of what is computed, or the bits that weights are stored in."""
        for layer in self._network.modules():
            if isinstance(layer, nn.QuantizedLinear):
                return f"{layer.bits} bits"
        found = {str(weight.dtype) for weight in _weights(self._network)}
        return ", ".join(sorted(name.removeprefix("mlx.core.") for name in found))

    def run(self) -> Iterator[str]:
        """Measure; yields what has just been done, after every turn of a side."""
        prompts = heldout_prompts(self._tokenizer, self.wanted.context, max(self.wanted.rows))
        theirs = BatchGeneratorSide(self._network)
        alone = StreamSide(self._network)
        own = [self._own_side(depth) for depth in self._depths]
        try:
            for rows in self.wanted.rows:
                sides: list[Side] = [theirs, *([alone] if rows == 1 else []), *own]
                before = list(self.figures)
                turns = measure(sides, prompts[:rows], self.wanted.laps, self.wanted.tokens)
                for line, name in turns:
                    self.figures = before + line
                    yield f"{in_rows(rows)}, {name}"
        finally:
            # MLX aborts a process that ends while its device is at work.
            mx.synchronize()

    def to_json(self) -> list[dict[str, Any]]:
        """The figures as `docs/benchmarks` has them."""
        return [
            {
                **vars(measured),
                **{name: dict(sorted(getattr(measured, name).items())) for name in COUNTS},
                "accepted": measured.accepted,
            }
            for measured in self.figures
        ]

    def chosen(self) -> dict[int, int]:
        """By rows, the depth at which `auto` took most of its steps."""
        return {m.rows: m.depth for m in self.figures if m.side == AUTO and m.laps}

    def _possible(self, depths: Sequence[int | str] | None) -> list[int | str]:
        if depths is None:
            return [*range(DEEPEST + 1), AUTO] if self.has_head else [0]
        for depth in depths:
            if depth and not self.has_head:
                raise BenchError(
                    f"--depths: got {depth}, but {self.wanted.model} has no MTP head to draft "
                    "with; measure depth 0 alone"
                )
        return list(depths)

    def _require_room(self) -> None:
        deepest = max((DEEPEST if d == AUTO else int(d) for d in self._depths), default=0)
        decoder = self._decoder(deepest, varies=AUTO in self._depths)
        room = MemoryBudget(budget(), self.weight_bytes, decoder.bytes_for)
        longest = self.wanted.context + 2 * self.wanted.tokens + (DEEPEST + 1) * LEARNING_STEPS
        sizes = [(self.wanted.context, longest)]
        too_many = [rows for rows in self.wanted.rows if not room.fits(sizes * rows)]
        if not too_many:
            return
        rows = min(too_many)
        most = next((n for n in range(rows, 0, -1) if room.fits(sizes * n)), 0)
        raise BenchError(
            f"--rows: {rows} rows of up to {longest} tokens take "
            f"{in_units(decoder.bytes_for(sizes * rows))} beside the model's "
            f"{in_units(self.weight_bytes)}, and there are {in_units(room.limit)} for both; "
            + (f"measure at most {most}" if most else "take a smaller model or --context")
        )

    def _own_side(self, depth: int | str) -> DecoderSide:
        if depth == AUTO:
            return DecoderSide(self._decoder(DEEPEST, varies=True), AUTO, AutoPolicy(DEEPEST))
        return DecoderSide(self._decoder(int(depth)), f"K={depth}")

    def _decoder(self, depth: int, *, varies: bool = False) -> Decoder:
        ragged = as_ragged(self._network, drafts=depth > 0)
        if ragged is not None:
            return RaggedDecoder(ragged, depth, varies=varies)
        return GeneratorDecoder(self._network, max(self.wanted.rows))


def heldout_prompts(tokenizer: Any, context: int, count: int) -> list[list[int]]:
    """Python that the demo model was not trained on, cut to ``context`` tokens at other places
    each; more than that when there is less of it goes round."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    texts = [tokenizer.encode(json.loads(line)["prompt"] + "\n\n\n") for line in lines]
    prompts = []
    for index in range(count):
        start = index % len(texts)
        tokens = itertools.chain.from_iterable(itertools.cycle(texts[start:] + texts[:start]))
        prompts.append(list(itertools.islice(tokens, context)))
    return prompts


def _weights(network: nn.Module) -> list[mx.array]:
    return [weight for _, weight in tree_flatten(network.parameters())]


def _bytes_of(network: nn.Module) -> int:
    return sum(weight.nbytes for weight in _weights(network))
