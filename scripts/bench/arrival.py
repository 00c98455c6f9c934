"""What do prompts that arrive cost the rows that run?

    python -m scripts.bench.arrival                       the demo model, a prompt of 3,600 tokens
    python -m scripts.bench.arrival --model PATH --prompt-tokens 32768
    python -m scripts.bench.arrival --jobs 200 --every 0.3

The worker's own scheduler, engine and prefix cache, without Redis. Without ``--jobs`` the figures
are the gaps between steps before a long prompt comes and while it is read, in one run. With
``--jobs`` prompts of 10 to 2,000 tokens arrive at random after the warm-up; the figures are windows
and steps a job, and what jobs waited for until it was traced or compared. That clock is the CPU
time of the process, so a loaded machine counts the same. ``--model stand-in`` is 32 layers that
cost the host what such a model costs it, and next to nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.loader import choose_fusion, load_engine
from omlx_worker.engine.ragged.footprint import PREFIX_SHARE, budget
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import BULK, DEFAULT
from scripts.bench.in_process import InProcess
from scripts.bench.shapes import SHAPES, random_network

STAND_IN = "stand-in"
SHORTEST = 10

numbers = itertools.count()


def request(prompt: list[int], tokens: int) -> GenerationRequest:
    return GenerationRequest(
        model="m", prompt=prompt, max_completion_tokens=tokens, temperature=0.0, ignore_eos=True
    )


def stand_in(folder: Path) -> None:
    """Write random weights in the stand-in's shape, with the demo model's tokenizer."""
    network = random_network(SHAPES[STAND_IN])
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())))
    (folder / "config.json").write_text(json.dumps(SHAPES[STAND_IN]))
    for file in resolve(DEMO).glob("token*"):
        shutil.copy(file, folder)


def gaps(engine: InProcess, steps: int, until: RowRequest | None = None) -> list[float]:
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


def long_prompts(engine: InProcess, rows: int, tokens: int) -> None:
    for number in range(rows):
        engine.add(request([40 + number] * 20, 3000), f"job-{next(numbers)}")
    gaps(engine, 50)
    before = gaps(engine, 200)
    # Twice: the first prompt compiles shapes, the second shows what remains.
    for turn in ("first prompt", "second prompt"):
        prompt = [50 + place % 200 for place in range(tokens)]
        long = engine.add(request(prompt, 2), f"job-{next(numbers)}")
        began = time.perf_counter()
        during = gaps(engine, 1 << 30, until=long)
        seconds = time.perf_counter() - began
        gaps(engine, 20)
        show(turn, statistics.median(before), during, seconds)


def arrivals(
    engine: InProcess, jobs: int, every: float, longest: int, level: int, seed: int
) -> None:
    """Let jobs arrive at random, ``every`` CPU seconds on average, and count what they take."""
    chance, counters = random.Random(seed), engine.counters
    at, due = 0.0, list[tuple[float, GenerationRequest]]()
    for _ in range(jobs):
        length = int(SHORTEST * (longest / SHORTEST) ** chance.random())
        prompt = [chance.randrange(3, 4000)] * length
        due.append((at, request(prompt, chance.randint(16, 96))))
        at += chance.expovariate(1 / every) if every else 0.0
    began, added, waits, open_rows = time.process_time(), dict[str, float](), list[float](), 0
    while due or open_rows:
        now = time.process_time() - began
        if not open_rows and due:
            began -= max(0.0, due[0][0] - now)
            now = time.process_time() - began
        while due and due[0][0] <= now:
            arrived, each = due.pop(0)
            added[engine.add(each, f"job-{next(numbers)}", level).row_id] = arrived
            open_rows += 1
        for emission in engine.act():
            if emission.row_id in added:
                waits.append(time.process_time() - began - added.pop(emission.row_id))
            open_rows -= emission.finish_reason is not None
    waits.sort()
    print(
        f"{jobs} jobs: {counters.prompt_windows / jobs:.2f} windows and "
        f"{counters.steps / jobs:.2f} steps a job, mean batch {counters.mean_batch:.1f}; "
        f"{counters.traces} traces and {counters.contests} contests; first tokens after "
        f"{statistics.median(waits):.2f} CPU seconds (median), {waits[int(0.9 * jobs)]:.2f} (90%); "
        f"{time.process_time() - began:.1f} in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--rows", type=int, default=4, help="that run while a long prompt is read")
    parser.add_argument("--prompt-tokens", type=int, default=3600)
    parser.add_argument("--prefill-chunk", type=int, default=LONGEST_CHUNK)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="let so many prompts arrive at random")
    parser.add_argument("--every", type=float, default=0.3, help="CPU seconds between two of them")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of their prompts")
    parser.add_argument("--bulk", action="store_true", help="as bulk jobs, which nobody watches")
    parser.add_argument("--cold", action="store_true", help="without the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.model == STAND_IN:
            stand_in(Path(folder))
        model = folder if args.model == STAND_IN else args.model
        rows = 32 if args.jobs else args.rows + 1
        prefixes = budget() // PREFIX_SHARE
        choose_fusion(model)
        loaded = load_engine(model, max_rows=rows, depth=args.depth, prefixes=prefixes)
        engine = InProcess(loaded, args.prefill_chunk)
        if args.jobs:
            if not args.cold:
                began = time.process_time()
                print(
                    f"warm-up: {engine.warm_up()} traces, {loaded.delays.contests} contests, ",
                    end="",
                )
                print(f"{time.process_time() - began:.1f} CPU seconds")
            level = BULK if args.bulk else DEFAULT
            arrivals(engine, args.jobs, args.every, args.longest, level, args.seed)
        else:
            long_prompts(engine, args.rows, args.prompt_tokens)
        loaded.close()


if __name__ == "__main__":
    main()
