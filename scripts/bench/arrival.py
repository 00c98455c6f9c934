#!/usr/bin/env python
"""How long running rows wait while a long prompt arrives: gaps between their tokens.

    python scripts/bench/arrival.py                       the demo model, a prompt of 3,600 tokens
    python scripts/bench/arrival.py --model PATH --prompt-tokens 32768

The worker's own scheduler and engine, without Redis. Gaps are compared within one run: of the
steps before the prompt came, and of those while it was read.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from omlx_producer.protocol import GenerationRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.decode.row import DecodeRow
from omlx_worker.engine.interface import Engine
from omlx_worker.engine.loader import DEMO, load_engine

numbers = itertools.count()


def row_of(engine: Engine, prompt: list[int], tokens: int) -> DecodeRow:
    request = GenerationRequest(
        model="m", prompt=prompt, max_completion_tokens=tokens, temperature=0.0, ignore_eos=True
    )
    name = f"job-{next(numbers)}"
    return DecodeRow(engine.prepare(request, name)[0])


def gaps(loop: DecodeLoop, done: DecodeRow | None, steps: int) -> list[float]:
    """Seconds between emissions, for so many steps or until a row's first token."""
    found: list[float] = []
    last = time.perf_counter()
    while len(found) < steps:
        emissions = loop.act()
        if not emissions:
            continue
        now = time.perf_counter()
        found.append(now - last)
        last = now
        if done and any(emission.row_id == done.row_id for emission in emissions):
            break
    return found


def show(turn: str, before: float, during: list[float], seconds: float) -> None:
    """Gaps while a prompt was read, and how many of the gaps before it each of them is."""
    ordered = sorted(during)
    figures = {
        "median": statistics.median(ordered),
        "99%": ordered[int(0.99 * len(ordered))],
        "most": ordered[-1],
    }
    listed = ", ".join(
        f"{name} {1000 * gap:.1f} ms ({gap / before:.2f} x)" for name, gap in figures.items()
    )
    print(f"{turn}, read in {seconds:.1f} s: gaps were {1000 * before:.1f} ms, then {listed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=3600)
    parser.add_argument("--prefill-chunk", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=0)
    args = parser.parse_args()
    engine = load_engine(args.model, max_rows=args.rows + 1, depth=args.depth)
    budget = MemoryBudget(1 << 62, engine.weight_bytes, engine.bytes_for)
    chunks = ChunkSize(args.prefill_chunk)
    loop = DecodeLoop(
        engine, budget, Counters(), driver=DepthDriver.fixed(engine.max_depth), chunks=chunks
    )
    for number in range(args.rows):
        loop.add([row_of(engine, [40 + number] * 20, 3000)])
    gaps(loop, None, 50)
    before = gaps(loop, None, 200)
    # Twice: the first time shows shapes that were never compiled, the second what stays.
    for turn in ("first prompt", "second prompt"):
        long = row_of(engine, [50 + place % 200 for place in range(args.prompt_tokens)], 2)
        loop.add([long])
        began = time.perf_counter()
        during = gaps(loop, long, 1 << 30)
        seconds = time.perf_counter() - began
        gaps(loop, None, 20)
        show(turn, statistics.median(before), during, seconds)
    engine.close()


if __name__ == "__main__":
    main()
