"""`omlx-worker bench`: one model, some numbers of rows, each depth and `auto`, beside mlx-lm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from omlx_producer.terminal import counted, in_units
from omlx_worker.bench.laps import LapPlan, Measured, measure
from omlx_worker.bench.prompts import heldout_prompts
from omlx_worker.bench.sides import (
    AUTO,
    BatchGeneratorSide,
    DecoderSide,
    Side,
    StreamSide,
)
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.engine.kernels.contest import HERE, Result
from omlx_worker.engine.loading.checkpoint import resolve
from omlx_worker.engine.loading.graft import Graft
from omlx_worker.engine.loading.loader import (
    choose_fusion,
    context_length,
    decoder_of,
    load,
    read_drafter,
)
from omlx_worker.engine.ragged.footprint import budget

DEEPEST = 3
"""Drafts a step that are tried by default, and that `auto` may choose."""


class BenchError(Exception):
    """The options cannot be measured. The message is one sentence for the user."""


class Benchmark:
    """A loaded model, and the sides to measure it with.

    Args:
        model: ``demo``, a folder, or a Hugging Face id.
        rows: numbers of rows that decode at the same time.
        depths: drafts a step, or ``auto``; None for all that the model can do.
        context: prompt tokens of each row.
        drafter: see `read_drafter`; lookups are not measured.
        graft: where the model gets its head from; None for its own.

    Raises:
        ModelError: if there is no such model or its files cannot be used.
        BenchError: if nothing makes the drafts asked for, or the rows do not fit in the model's
            context or the memory.

    Attributes:
        figures: the figures so far, in the order of the table.
        family: the type in the model's configuration.
        dtype, weight_bytes: of the weights.
        slow: what the ragged batch runs without its fast form.
    """

    def __init__(
        self,
        model: str,
        rows: Sequence[int],
        depths: Sequence[int | str] | None,
        context: int,
        plan: LapPlan,
        drafter: str = "head",
        graft: Graft | None = None,
    ) -> None:
        self.figures: list[Measured] = []
        choose_fusion(model)
        network, tokenizer, config = load(resolve(model), graft=graft)
        if context + plan.tokens > (most := context_length(config)):
            raise BenchError(
                f"--context: got {context} beside --tokens {plan.tokens}, but the context of "
                f"{model} has {most} tokens; give at most {most} together"
            )
        make_drafter = read_drafter(drafter, tokenizer)
        self.family = str(config.get("model_type", "model"))
        self.dtype = precision(network)
        drafts_here = decoder_of(network, max(rows), DEEPEST, make_drafter).own_depth > 0
        depths = _possible_depths(drafts_here, model, depths)
        deepest_of = {depth: DEEPEST if depth == AUTO else int(depth) for depth in depths}
        decoders = {
            depth: decoder_of(network, max(rows), drafts, make_drafter)
            for depth, drafts in deepest_of.items()
        }
        deepest = max(decoders.values(), key=lambda decoder: decoder.max_depth)
        self.weight_bytes = deepest.weight_bytes
        self.slow = list(deepest.slow_parts)
        memory = MemoryBudget(budget(), deepest.weight_bytes, deepest.bytes_for)
        _require_memory(memory, rows, context, plan)
        self._prompts = heldout_prompts(tokenizer, context, max(rows))
        self._plan = plan
        theirs: list[Side] = [BatchGeneratorSide(network), StreamSide(network)]
        own = [
            DecoderSide(decoder, "auto" if depth == AUTO else "mtp")
            for depth, decoder in decoders.items()
        ]
        self._settings = [(n, [*theirs[: 1 + (n == 1)], *own]) for n in rows]

    @property
    def forms(self) -> list[Result]:
        """Which forms of its layers' parts ran so far, and how fast they are."""
        return list(HERE.results)

    def run(self) -> Iterator[str]:
        """Measure; yields the progress after every turn of a side."""
        turns = sum(len(sides) for _, sides in self._settings) * (self._plan.laps + 1)
        done = itertools.count(1)
        try:
            for rows, sides in self._settings:
                before = list(self.figures)
                for line, name in measure(sides, self._prompts[:rows], self._plan):
                    self.figures = before + line
                    yield f"{counted(rows, 'row')}, {name}: {next(done)} of {turns} laps done"
        finally:
            # MLX aborts a process that ends while its device is at work.
            mx.synchronize()


def _possible_depths(
    can_draft: bool, model: str, wanted: Sequence[int | str] | None
) -> Sequence[int | str]:
    if wanted is None:
        return [*range(DEEPEST + 1), AUTO] if can_draft else [0]
    drafts = next((depth for depth in wanted if depth), 0)
    if drafts and not can_draft:
        raise BenchError(
            f"--depths: got {drafts}, but nothing drafts for {model} (lookups are not measured); "
            "measure depth 0 alone, or give --mtp-from or --drafter MODEL"
        )
    return wanted


def _require_memory(
    memory: MemoryBudget, counts: Sequence[int], context: int, plan: LapPlan
) -> None:
    longest = context + 2 * plan.tokens + (DEEPEST + 1) * plan.learn
    row = [(context, longest)]
    rows = min((rows for rows in counts if not memory.fits(row * rows)), default=0)
    if not rows:
        return
    most = next((n for n in range(rows, 0, -1) if memory.fits(row * n)), 0)
    raise BenchError(
        f"--rows: {counted(rows, 'row')} of up to {longest} tokens take "
        f"{in_units(memory.bytes_for(row * rows))} beside the model's "
        f"{in_units(memory.weights)}, and there are {in_units(memory.limit)} for both; "
        + (f"measure at most {most}" if most else "take a smaller model or --context")
    )


def precision(network: nn.Module) -> str:
    """The type of a network's weights, or the bits that they are quantized to."""
    for layer in network.modules():
        if isinstance(layer, nn.QuantizedLinear):
            return f"{layer.bits} bits"
    found = {str(weight.dtype) for _, weight in tree_flatten(network.parameters())}
    return ", ".join(sorted(name.removeprefix("mlx.core.") for name in found))
