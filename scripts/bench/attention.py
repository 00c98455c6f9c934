"""How long does attention of a step take: this project's forms beside mlx-lm's on one cache?

    python -m scripts.bench.attention
    python -m scripts.bench.attention --heads 16 4 256 --layers 8 --widths 1 4 --contexts 256 8192

Each layer attends to keys and values of its own, and its output makes the next one's queries, so
nothing runs beside anything else. `mlx` has the fused attention on a cache of the same tokens in
one piece, and does not write it. Prints microseconds a layer, the median of laps in turns, and the
forms that this device has timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import capacity_for, pages_for
from omlx_worker.engine.kernels.attention import Attention
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window, own_pages

STEPS = 10
"""Dispatched one ahead, in each lap."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], help="HQ H D")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--laps", type=int, default=7)
    return parser.parse_args()


class Case:
    """Layers of one shape, with rows of one length."""

    def __init__(self, arguments: argparse.Namespace, rows: int, width: int, context: int) -> None:
        self.query_heads, self.heads, self.size = arguments.heads
        self.layers, self.rows, self.width, self.context = arguments.layers, rows, width, context
        self.dtype = mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16
        self.queries = self._noise(self.query_heads, width)

    def ragged(self, attention: Attention) -> Callable[[], Any]:
        filled = TAIL // 2
        table = own_pages(self.rows, pages_for(capacity_for(self.context)))
        shapes = [(self.rows, TAIL)] * 2 + [(table.size, PAGE)] * 2
        caches = [
            AttentionCache([self._noise(self.heads, n, slots=count) for count, n in shapes])
            for _ in range(self.layers)
        ]
        lengths = mx.full((self.rows,), self.context - filled, mx.int32)

        def run(queries: mx.array, cursors: mx.array, arrays: list[list[mx.array]]) -> Any:
            window = Window.at(cursors, lengths, self.width, table)
            views = [AttentionCache(part, attention=attention) for part in arrays]
            for view in views:
                new = queries[:, : self.heads]
                view.put(new, new, window)
                queries = view.attend(queries, window, self.size**-0.5)
            return queries, [view.written for view in views]

        step = mx.compile(run)
        cursors = lengths + filled

        def advance() -> Any:
            out, written = step(self.queries, cursors, [cache.arrays for cache in caches])
            for cache, part in zip(caches, written, strict=True):
                cache.update(part)
            mx.async_eval(out, written)
            return out

        return advance

    def fused(self) -> Callable[[], Any]:
        length = self.context + self.width
        kept = [[self._noise(self.heads, length) for _ in range(2)] for _ in range(self.layers)]

        def run(queries: mx.array, arrays: list[list[mx.array]]) -> mx.array:
            for keys, values in arrays:
                queries = mx.fast.scaled_dot_product_attention(
                    queries,
                    keys,
                    values,
                    scale=self.size**-0.5,
                    mask="causal" if self.width > 1 else None,
                )
            return queries

        step = mx.compile(run)

        def advance() -> mx.array:
            out = step(self.queries, kept)
            mx.async_eval(out)
            return out

        return advance

    def _noise(self, heads: int, length: int, slots: int = 0) -> mx.array:
        shape = (slots or self.rows, heads, length, self.size)
        return mx.random.normal(shape).astype(self.dtype)


def lap(advance: Callable[[], Any]) -> float:
    """Seconds of a step."""
    mx.eval(advance())
    begun = time.perf_counter()
    last = None
    for _ in range(STEPS):
        out = advance()
        if last is not None:
            mx.eval(last)
        last = out
    mx.eval(last)
    return (time.perf_counter() - begun) / STEPS


def main() -> None:
    arguments = parse()
    contest, names = Contest(), ("plain", "here", "mlx")
    print(f"{'rows':>6}{'width':>7}{'context':>9}" + "".join(f"{name:>9}" for name in names))
    for context, width, rows in product(arguments.contexts, arguments.widths, arguments.rows):
        case = Case(arguments, rows, width, context)
        sides = [
            case.ragged(PlainAttention()),
            case.ragged(for_device(contest).attention),
            case.fused(),
        ]
        times: list[list[float]] = [[] for _ in sides]
        for side in sides:
            lap(side)
        for _ in range(arguments.laps):
            for side, found in zip(sides, times, strict=True):
                found.append(1e6 * lap(side) / case.layers)
        figures = "".join(f"{statistics.median(found):9.1f}" for found in times)
        print(f"{rows:6}{width:7}{context:9}{figures}", flush=True)
    for result in contest.results:
        print(result)


if __name__ == "__main__":
    main()
