"""Compare the worker's modes through Redis: jobs in, results out, real worker processes.

    python -m scripts.bench.modes                       the demo model, 1 to 16 jobs at once
    python -m scripts.bench.modes --model PATH --jobs 1 8

One worker a mode, all alive on one server of the script's own, one of them busy at a time. In a
lap so many clients submit a job, wait for its result, and submit the next. Modes take turns, in
another order each lap, and a ratio is the median over laps of two modes' speeds in the same one, so
that what else the machine is doing falls on all alike. Two processes that do the same may differ in
speed for as long as they live (by 5% on one machine of two cores), so all workers are started anew
a few times. `auto` then goes on from what it has learnt; at the end that is forgotten.
On Linux, preload OpenBLAS as for engine.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omlx_producer.client import Producer
from omlx_worker.bench.laps import in_turn
from omlx_worker.engine.loader import DEMO, resolve
from omlx_worker.queue.embedded import EmbeddedRedis

FIXED = ("batched", "mtp")
MODES = (*FIXED, "hybrid", "auto")
LOAD_SECONDS = 600.0

Figures = dict[int, dict[str, list[float]]]
"""By jobs at once and mode, the tokens per second of every lap."""


@contextmanager
def worker(url: str, model: str, mode: str, max_batch: int, state: str) -> Iterator[None]:
    """A worker process that serves the model under its mode's name."""
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    command += [
        "--model",
        model,
        "--redis-url",
        url,
        "--model-alias",
        mode,
        "--mode",
        mode,
        "--max-batch",
        str(max_batch),
    ]
    process = subprocess.Popen(command, env=os.environ | {"OMLX_QUEUE_STATE_DIR": state})
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def wait_until_served(producer: Producer, modes: Sequence[str]) -> None:
    deadline = time.monotonic() + LOAD_SECONDS
    while set(modes) - set(producer.models()):
        if time.monotonic() > deadline:
            sys.exit(f"the workers did not load the model within {LOAD_SECONDS:g} s")
        time.sleep(0.1)


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
        count: int = job.result(timeout=LOAD_SECONDS)["usage"]["completion_tokens"]
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
    parser.add_argument("--starts", type=int, default=3, help="of all workers, so many laps each")
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


def run(
    args: argparse.Namespace, folder: Path, workers: Sequence[str], first: int, figures: Figures
) -> None:
    """Start the workers in this order, and add the speeds of the laps from ``first`` on."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"][: args.prompt_characters] for line in lines]
    with ExitStack() as stack:
        server = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        url = stack.enter_context(EmbeddedRedis(Path(server))).url
        for mode in workers:
            stack.enter_context(worker(url, args.model, mode, max(args.jobs), str(folder)))
        producer = stack.enter_context(Producer(url))
        wait_until_served(producer, args.modes)
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
