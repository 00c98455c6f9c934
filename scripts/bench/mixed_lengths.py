"""How much does one long row slow the short ones beside it?

    python -m scripts.bench.mixed_lengths                           the demo model, 8k and 32k
    python -m scripts.bench.mixed_lengths --model PATH --long 131072 --depth 3

Two batches take turns, a stretch of steps each: the short rows alone, and the short rows with a
long one. The caches hold made-up values: what a step costs does not depend on them. Ratios are
medians over the laps of one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.loader import load
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch, Held
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix_arrays import ArraySpec, LayerSpecs
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row

STEPS = 16
"""Of a stretch, at most; fewer where a tail would fill up in a run."""


@dataclass
class Contender:
    """One batch, and what its stretches of steps took.

    Attributes:
        laps: seconds a step, of each stretch.
        bodies: bytes of its attention bodies.
        peak: bytes that steps took on top of what there was.
    """

    beside: str
    lengths: list[int]
    laps: list[float] = field(default_factory=list)
    bodies: int = 0
    peak: int = 0

    def fill(self, model: RaggedModel, depth: int) -> None:
        self.batch = RaggedDecoder(model, depth)
        for index, length in enumerate(self.lengths):
            request = RowRequest(str(index), [1] * (length + 1), 1 << 20, Sampling(0.0))
            join_made_up(self.batch, model, Row(request))
        self.bodies = sum(
            array.nbytes
            for cache in self.batch.caches
            if isinstance(cache, AttentionCache)
            for array in cache.pool.arrays
        )

    def stretch(self, steps: int, *, warm: bool = False) -> None:
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        began = time.perf_counter()
        for _ in range(steps):
            self.batch.step()
        mx.synchronize()
        seconds = time.perf_counter() - began
        if not warm:
            self.laps.append(seconds / steps)
            self.peak = max(self.peak, mx.get_peak_memory() - before)


def join_made_up(batch: Batch, model: RaggedModel, row: Row) -> None:
    """Let a row join as if its prompt had been read. Its pages have any contents."""
    length = row.computed = row.left
    batch.reserve([(row, length)])
    layers = [
        [_made_up(spec, length) for spec in specs if spec.positions is not None]
        for specs in LayerSpecs.of(model).layers
    ]
    batch.rows[row] = Held(layers)
    batch.join([row])


def _made_up(spec: ArraySpec, length: int) -> mx.array:
    shape = list(spec.shape)
    if spec.positions:
        shape[2] = min(length, spec.positions)
    return mx.broadcast_to(mx.ones((), spec.dtype), shape)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--rows", type=int, default=8, help="short rows")
    parser.add_argument("--short", type=int, default=200, help="tokens of each")
    parser.add_argument("--long", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--laps", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse()
    room = TAIL - 1 - max(args.depth, 1)
    steps = min(STEPS, room // ((args.laps + 1) * (1 + args.depth)))
    if not steps:
        raise SystemExit(f"--laps: got {args.laps}, more than a tail has room for; give fewer")
    network, _, _ = load(resolve(args.model))
    model = as_ragged(network, drafts=args.depth > 0)
    title = f"{args.model} on {mx.default_device()}, MLX {mx.__version__}, {args.depth} drafts"
    table = Table(title=f"{args.rows} rows of {args.short} tokens; {title}")
    for name in (
        "beside them",
        "ms/step",
        "x alone (range)",
        "bodies MB",
        "in passing MB",
    ):
        table.add_column(name, justify="right")
    for length in args.long:
        short = [args.short] * args.rows
        contenders = [Contender("none", short), Contender(f"{length}", [*short, length])]
        random.seed(0)
        for contender in contenders:
            contender.fill(model, args.depth)
            contender.stretch(steps, warm=True)
        for _ in range(args.laps):
            for contender in random.sample(contenders, len(contenders)):
                contender.stretch(steps)
        alone = contenders[0]
        for contender in contenders:
            ratios = [lap / base for lap, base in zip(contender.laps, alone.laps, strict=True)]
            table.add_row(
                contender.beside,
                f"{1000 * statistics.median(contender.laps):.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                f"{contender.bodies / 1e6:.0f}",
                f"{contender.peak / 1e6:.0f}",
            )
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    main()
