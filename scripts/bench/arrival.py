"""How long do running rows wait for tokens while the worker reads a long prompt?

    python -m scripts.bench.arrival                       the demo model, a prompt of 3,600 tokens
    python -m scripts.bench.arrival --model PATH --prompt-tokens 32768

The worker's own scheduler and engine, without Redis. The figures are the gaps between steps before
the prompt comes and while it is read, in one run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.loading.checkpoint import DEMO
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.row import Row
from scripts.bench.in_process import InProcess

numbers = itertools.count()


def request(prompt: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(
        model="m", prompt=prompt, max_completion_tokens=tokens, temperature=0.0, ignore_eos=True
    )


def gaps(engine: InProcess, steps: int, until: Row | None = None) -> list[float]:
    """Seconds between emissions, for ``steps`` of them or until a row's first token."""
    found: list[float] = []
    last = time.perf_counter()
    while len(found) < steps:
        emissions = engine.act()
        if not emissions:
            continue
        now = time.perf_counter()
        found.append(now - last)
        last = now
        if until and any(emission.row_id == until.row_id for emission in emissions):
            break
    return found


def show(turn: str, before: float, during: list[float], seconds: float) -> None:
    """Print gaps while a prompt was read, and each as a multiple of the gap before it."""
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
    parser.add_argument("--prefill-chunk", type=int, default=LONGEST_CHUNK)
    parser.add_argument("--depth", type=int, default=0)
    args = parser.parse_args()
    loaded = load_engine(args.model, max_rows=args.rows + 1, depth=args.depth)
    engine = InProcess(loaded, args.prefill_chunk)
    for number in range(args.rows):
        engine.add(request([40 + number] * 20, 3000), f"job-{next(numbers)}")
    gaps(engine, 50)
    before = gaps(engine, 200)
    # Twice: the first prompt compiles shapes, the second shows what remains.
    for turn in ("first prompt", "second prompt"):
        prompt = [50 + place % 200 for place in range(args.prompt_tokens)]
        long = engine.add(request(prompt, 2), f"job-{next(numbers)}")
        began = time.perf_counter()
        during = gaps(engine, 1 << 30, until=long)
        seconds = time.perf_counter() - began
        gaps(engine, 20)
        show(turn, statistics.median(before), during, seconds)
    loaded.close()


if __name__ == "__main__":
    main()
