"""How fast is `auto` beside fixed depths in one process, and what do its steps take?

    python -m scripts.bench.depths                                  the demo model, depths 0 and 3
    python -m scripts.bench.depths --model PATH --jobs 1 8 --laps 12

The worker's decode loop, without Redis, over an engine for each mode: `batched` is
depth 0, `mtp` the deepest. In a lap so many jobs run at once, and each that ends is followed by
another. Modes take turns, and a ratio is taken within a lap. Beside the tokens per second, a table
tells for each mode and depth the milliseconds of a step in the middle of steps at that depth, of
one around which the depth changes, and how often a step was traced.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from omlx_producer.wire import GenerationRequest
from omlx_worker.bench.laps import in_turn
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.build import load_engine
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver, make_policy
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.loading.checkpoint import DEMO
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.row import Row
from omlx_worker.settings import WorkerSettings

FIXED = ("batched", "mtp")
numbers = itertools.count()


class Mode:
    """An engine under the worker's decode loop; keeps what its steps took."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        settings = WorkerSettings(
            model=args.model,
            mode=name,
            max_batch=max(args.jobs),
            drafter="head,lookup" if args.lookup else "head",
        )
        self.name = name
        self.speeds: dict[int, list[float]] = defaultdict(list)
        self.steps: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
        self.traces = 0
        self._clock = time.process_time if args.processor_time else time.perf_counter
        self._engine = engine = load_engine(settings)
        self._driver = DepthDriver(make_policy(settings.mode, engine.max_depth, engine.own_depth))
        budget = MemoryBudget(engine.memory_budget, engine.weight_bytes, engine.bytes_for)
        self._loop = DecodeLoop(
            engine, budget, Counters(), driver=self._driver, chunks=ChunkSize(LONGEST_CHUNK)
        )
        self._before = self._ended = 0.0
        self._depths = (0, 0)

    def lap(self, requests: Sequence[GenerationRequest], jobs: int, *, counts: bool) -> None:
        """Run the requests, ``jobs`` of them at once."""
        left, running, tokens = list(requests), 0, 0
        began = self._ended = self._clock()
        while left or running:
            while left and running < jobs:
                [row] = self._engine.prepare(left.pop(), f"bench-{next(numbers)}")
                self._loop.add([Row(row)])
                running += 1
            before = self._engine.delays
            emissions = self._loop.act() or []
            if emissions:
                tokens += sum(len(emission.tokens) for emission in emissions)
                running -= sum(emission.finish_reason is not None for emission in emissions)
                self._stepped(emissions, jobs, traced=self._engine.delays != before)
        if counts:
            self.speeds[jobs].append(tokens / (self._clock() - began))

    def _stepped(self, emissions: Sequence[Emission], jobs: int, *, traced: bool) -> None:
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        depth = max(emission.drafted for emission in emissions)
        steady = (depth, self._driver.depth) == self._depths == (depth, depth)
        self._depths = depth, self._driver.depth
        self.traces += traced
        if len(emissions) == jobs and not traced:
            self.steps[jobs, depth, steady].append(1000 * seconds)


def requests(args: argparse.Namespace, jobs: int, seed: int) -> list[GenerationRequest]:
    texts = [text[: args.prompt_characters] for text in heldout_texts()]
    return [
        GenerationRequest(
            model="m",
            prompt=texts[(seed * jobs + n) % len(texts)],
            max_completion_tokens=args.tokens,
            temperature=args.temperature,
            ignore_eos=True,
            seed=n,
        )
        for n in range(jobs * args.rounds)
    ]


def show(modes: Mapping[str, Mode], jobs: Sequence[int]) -> None:
    speeds, steps = (
        Table("jobs at once", *modes, "auto / better fixed (quartiles, range)"),
        Table("jobs at once", "mode", "depth", "steps", "ms amid such steps", "ms around a change"),
    )
    for count in jobs:
        laps = {name: mode.speeds[count] for name, mode in modes.items()}
        better = max((n for n in FIXED if n in laps), key=lambda n: statistics.median(laps[n]))
        ratios = [ours / best for ours, best in zip(laps["auto"], laps[better], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        speeds.add_row(
            str(count),
            *(f"{statistics.median(each):.0f}" for each in laps.values()),
            f"{middle:.3f} of {better} ({low:.3f}-{high:.3f}, {min(ratios):.3f}-{max(ratios):.3f})",
        )
        for name, mode in modes.items():
            for depth in sorted({depth for at, depth, _ in mode.steps if at == count}):
                times = [mode.steps[count, depth, steady] for steady in (True, False)]
                told = [f"{statistics.median(each):.2f}" if each else "" for each in times]
                steps.add_row(str(count), name, str(depth), str(sum(map(len, times))), *told)
    console = Console()
    console.print("tokens per second, medians over laps", speeds, steps)
    console.print("traces:", {name: mode.traces for name, mode in modes.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="a job")
    parser.add_argument("--rounds", type=int, default=2, help="jobs at each place in a lap")
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--warm-laps", type=int, default=2, help="not counted")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompt-characters", type=int, default=300)
    parser.add_argument("--lookup", action="store_true", help="look drafts up too")
    parser.add_argument(
        "--processor-time", action="store_true", help="of this process, where others run too"
    )
    args = parser.parse_args()
    modes = {name: Mode(name, args) for name in (*FIXED, "auto")}
    for jobs in args.jobs:
        for number in range(-args.warm_laps, args.laps):
            for mode in in_turn(list(modes.values()), number):
                mode.lap(requests(args, jobs, number), jobs, counts=number >= 0)
    show(modes, args.jobs)
    # MLX aborts a process that ends while its device is at work.
    mx.synchronize()


if __name__ == "__main__":
    main()
