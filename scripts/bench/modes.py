"""How fast is each mode of the worker through Redis, and `auto` beside the better fixed one?

    python -m scripts.bench.modes                       the demo model, 1 to 16 jobs at once
    python -m scripts.bench.modes --model PATH --jobs 1 8

One worker a mode on one Redis server of the script's own; one of them is busy at a time. In a lap
each client submits a job, waits for its result, and submits the next. Modes take turns, and a ratio
is taken within a lap. Two processes that do the same can differ in speed for as long as they live
(5% on one machine of two cores), so all workers are started anew a few times. `auto` learns in the
laps that are not counted.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omlx_producer.producer import Producer
from omlx_worker.bench.laps import in_turn
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.engine.loading.checkpoint import DEMO
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.processes import Process, wait_until_served, worker

FIXED = ("batched", "mtp")
MODES = (*FIXED, "hybrid", "auto")
RESULT_SECONDS = 600.0

Figures = dict[int, dict[str, list[float]]]
"""Tokens per second of every lap, by jobs at once and by mode."""


def lap(
    producer: Producer, mode: str, prompts: Sequence[str], clients: int, tokens: int, seed: int
) -> float:
    """Tokens per second of a job for each prompt, from the first submit to the last result."""

    def generated(prompt: str) -> int:
        job = producer.submit(
            model=mode,
            prompt=prompt,
            max_completion_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            seed=seed,
        )
        count: int = job.result(timeout=RESULT_SECONDS)["usage"]["completion_tokens"]
        return count

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(generated, prompts))
    return total / (time.perf_counter() - began)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=256, help="a job")
    parser.add_argument("--rounds", type=int, default=4, help="jobs of a client in a lap")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="of all workers")
    parser.add_argument("--warm-laps", type=int, default=2, help="of a start, not counted")
    parser.add_argument("--prompt-characters", type=int, default=300)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    figures: Figures = {jobs: {mode: [] for mode in args.modes} for jobs in args.jobs}
    with tempfile.TemporaryDirectory() as folder:
        for start in range(args.starts):
            workers = args.modes[start % len(args.modes) :] + args.modes[: start % len(args.modes)]
            run(args, Path(folder), workers, start * args.laps, figures)
            Console(stderr=True).print(f"start {start + 1} of {args.starts}: done", style="dim")
    show(figures)


def started(
    args: argparse.Namespace, url: str, folder: Path, mode: str
) -> AbstractContextManager[Process]:
    """A worker whose alias is its mode."""
    options = {"model": args.model, "max-batch": max(args.jobs), "mode": mode}
    return worker(url, mode, options, {"OMLX_QUEUE_STATE_DIR": str(folder)})


def run(
    args: argparse.Namespace, folder: Path, workers: Sequence[str], first: int, figures: Figures
) -> None:
    """Start the workers in this order, and add the speeds of the laps from ``first`` on."""
    texts = [text[: args.prompt_characters] for text in heldout_texts()]
    with ExitStack() as stack:
        server = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        url = stack.enter_context(EmbeddedRedis(Path(server))).url
        processes = [stack.enter_context(started(args, url, folder, mode)) for mode in workers]
        producer = stack.enter_context(Producer(url))
        wait_until_served(producer, args.modes, processes)
        for jobs, seen in figures.items():
            for number in range(first - args.warm_laps, first + args.laps):
                prompts = [texts[(number + n) % len(texts)] for n in range(jobs * args.rounds)]
                for mode in in_turn(args.modes, number):
                    speed = lap(producer, mode, prompts, jobs, args.tokens, number)
                    if number >= first:
                        seen[mode].append(speed)
                if args.json:
                    args.json.write_text(json.dumps(figures))


def show(figures: Figures) -> None:
    modes = list(next(iter(figures.values())))
    fixed = [mode for mode in FIXED if mode in modes]
    compares = "auto" in modes and bool(fixed)
    table = Table("jobs at once", *modes, *["auto / better fixed (range)"] * compares)
    for jobs, seen in figures.items():
        cells = [f"{statistics.median(seen[mode]):.0f}" for mode in modes]
        if compares:
            better = max(fixed, key=lambda mode: statistics.median(seen[mode]))
            ratios = [auto / best for auto, best in zip(seen["auto"], seen[better], strict=True)]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            cells.append(f"{middle:.3f} ({low:.3f}-{high:.3f}) of {better}")
        table.add_row(str(jobs), *cells)
    Console().print("tokens per second through Redis, medians over laps")
    Console().print(table)


if __name__ == "__main__":
    main()
