"""What does the queue cost? The worker through Redis, and the same engine in one process.

    python -m scripts.bench.pipeline --json pipeline.json          the demo model, 1 to 64 jobs
    python -m scripts.bench.pipeline --mode mtp --mtp-depth 1 --jobs 1 32
    python -m scripts.bench.pipeline --step 0.02                   an engine that only sleeps

One worker process, a Redis server with an append-only file, and clients in this process, which also
holds the engine that the worker is compared with. Sides take turns with the same prompts and number
of tokens, at a fixed draft depth, and a ratio is taken within a lap. With ``--step`` the engine
sleeps, as the processor does while a GPU computes, so only the queue's cost is left.

On Linux, preload OpenBLAS and leave it one core less than there are, because its threads spin while
they wait: OPENBLAS_NUM_THREADS=1 LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omlx_producer import Producer
from omlx_producer.wire import GenerationRequest
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.bench.report import machine
from omlx_worker.engine.loading.checkpoint import DEMO
from omlx_worker.engine.loading.loader import choose_fusion, load_engine
from omlx_worker.engine.rows.interface import Engine
from omlx_worker.processes import Child
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.pipeline.clients import WorkerSide
from scripts.bench.pipeline.engines import InProcessSide
from scripts.bench.pipeline.report import MEANING, SLOW, show
from scripts.bench.pipeline.stock import STOCK_QUEUE, StockSide
from scripts.bench.processes import running, wait_until_served, worker
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.workers import ALIAS, SCRIPT

LEASE_SECONDS = 30
STOCK_WORKER = ("-m", "scripts.bench.stock_job")
ENVIRONMENT = ("OPENBLAS_NUM_THREADS", "LD_PRELOAD")
SLOW_AMONG = 32
"""Where a lap with a slow consumer is added, as one of so many."""


def requests_of(count: int, args: argparse.Namespace) -> list[GenerationRequest]:
    """Held-out prompts, the same in every lap: new lengths would be compiled by the first side
    that meets them."""
    texts = [text[: args.prompt_characters] for text in heldout_texts()]
    chosen = itertools.islice(itertools.cycle(texts), count)
    return [
        GenerationRequest(
            model=ALIAS,
            prompt=prompt,
            max_completion_tokens=args.tokens,
            temperature=0.0,
            seed=number,
            ignore_eos=True,
        )
        for number, prompt in enumerate(chosen)
    ]


class Sides:
    """Everything that is measured, alive for the length of a ``with`` block."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._stack = ExitStack()
        self._stock: StockSide | None = None

    def __enter__(self) -> Sides:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def lap(self, jobs: int, number: int) -> dict[str, Any]:
        """Every side once with the same requests; the order turns round from lap to lap."""
        requests = requests_of(jobs, self._args)
        turns = {
            self._in_process.name: lambda: self._in_process.lap(requests),
            self._worker.name: lambda: self._worker.lap(requests),
        }
        if jobs == SLOW_AMONG:
            turns[SLOW] = lambda: self._worker.lap(requests, slow=True)
        order = list(turns) if number % 2 else list(turns)[::-1]
        figures = {name: turns[name]().to_json() for name in order}
        if self._stock:
            figures[self._stock.name] = self._stock.lap(requests[: self._args.stock_jobs])
        return figures

    def warm(self, jobs: int) -> None:
        """Let both engines compile the shapes that this many jobs go through."""
        requests = requests_of(jobs, self._args)
        self._in_process.lap(requests)
        self._worker.lap(requests)
        if self._stock:
            self._stock.lap(requests[:1])

    def _start(self) -> None:
        args, enter = self._args, self._stack.enter_context
        server = enter(EmbeddedRedis(Path(enter(TemporaryDirectory()))))
        process = enter(self._worker_process(server.url))
        producer = enter(Producer(server.url))
        if not args.step:
            stock = enter(running(*STOCK_WORKER, server.url, STOCK_QUEUE, args.model))
            self._stock = StockSide(producer.connection, stock.pid)
        engine = self._engine()
        self._stack.callback(engine.close)
        wait_until_served(producer, [ALIAS], [process])
        redis = producer.connection.info("server")["process_id"]
        self._worker = WorkerSide(producer, server.url, worker=process.pid, redis=redis)
        self._in_process = InProcessSide(engine)

    def _worker_process(self, url: str) -> AbstractContextManager[Child]:
        args = self._args
        if args.step:
            sleep = (f"--step-seconds={args.step}", f"--max-rows={args.max_batch}")
            return running(str(SCRIPT), url, *sleep, f"--lease-seconds={LEASE_SECONDS}")
        options = {"model": args.model, "mode": args.mode, "mtp-depth": args.depth}
        return worker(url, ALIAS, {**options, "max-batch": args.max_batch})

    def _engine(self) -> Engine:
        args = self._args
        if args.step:
            return FakeEngine(args.max_batch, args.step)
        choose_fusion(args.model)
        return load_engine(args.model, max_rows=args.max_batch, depth=args.depth)


def measure(args: argparse.Namespace, into: dict[str, Any]) -> Iterator[None]:
    """Fill in points; yields after each lap, so that what there is can be kept."""
    with Sides(args) as sides:
        for jobs in args.jobs:
            point: dict[str, Any] = {"jobs": jobs, "laps": []}
            into["points"].append(point)
            sides.warm(jobs)
            for number in range(args.laps):
                figures = sides.lap(jobs, number)
                point["laps"].append(figures)
                speeds = (f"{n} {f['tokens_per_second']:.0f}" for n, f in figures.items())
                print(f"{jobs:2} jobs, tokens/s:", ", ".join(speeds), file=sys.stderr)
                yield


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--mode", choices=["batched", "mtp"], default="batched")
    parser.add_argument("--mtp-depth", type=int, default=1, help="drafts a step in mode mtp")
    parser.add_argument("--step", type=float, default=0.0, help="no model: seconds slept a step")
    parser.add_argument("--max-batch", type=int, help="the largest number of jobs by default")
    parser.add_argument("--jobs", type=int, nargs="+", default=[32, 1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64, help="a job")
    parser.add_argument("--prompt-characters", type=int, default=60)
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--stock-jobs", type=int, default=1, help="jobs a lap for the stock worker")
    parser.add_argument("--json", type=Path, help="write the figures here, after every lap")
    args = parser.parse_args()
    args.max_batch = args.max_batch or max(args.jobs)
    args.depth = 0 if args.mode == "batched" else args.mtp_depth
    return args


def description(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured, before there are figures."""
    environment = [f"{name}={os.environ[name]}" for name in ENVIRONMENT if name in os.environ]
    engine = f"asleep for {1000 * args.step:g} ms a step" if args.step else args.model
    return {
        "what": "pipeline",
        "meaning": MEANING,
        "model": engine,
        "mode": "batched" if args.step else args.mode,
        "depth": 0 if args.step else args.depth,
        "step": args.step,
        "tokens_a_job": args.tokens,
        "command": " ".join(
            [*environment, "python", "-m", "scripts.bench.pipeline", *sys.argv[1:]]
        ),
        **machine(),
        "points": [],
    }


def main() -> None:
    args = parse()
    results = description(args)
    try:
        for _ in measure(args, results):
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    except KeyboardInterrupt:
        print("interrupted; this is what was measured", file=sys.stderr)
    finally:
        show(results)


if __name__ == "__main__":
    main()
