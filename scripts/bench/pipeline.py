#!/usr/bin/env python
"""Measure the whole path, Redis to Redis: the real worker and real clients beside the bare engine.

    python scripts/bench/pipeline.py --json pipeline.json          the demo model, 1 to 64 jobs
    python scripts/bench/pipeline.py --mode mtp --mtp-depth 1 --jobs 1 32
    python scripts/bench/pipeline.py --step 0.02                   an engine that only sleeps

One worker process, a Redis server of the script's own that keeps an append-only file, and clients
in this process, which also holds the engine that the worker is compared with. All sides of a lap
take turns with the same prompts and the same number of tokens; ratios are taken within each lap.
The depth of drafts is fixed, so that both do the same work. With ``--step`` the engine sleeps in
the place of a device that computes, and what is left is the path alone.

On Linux, preload OpenBLAS as for engine.py, and leave it one core less than there are: its threads
wait for each other actively, and whatever else runs then stops all of them:

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=.../openblas-pthread/libblas.so.3 python scripts/bench/...
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "producer"), str(ROOT / "worker")]

from pipeline_clients import WorkerSide  # noqa: E402
from pipeline_engines import InProcessSide, PlainLoopSide  # noqa: E402
from pipeline_page import MEANING, page, show  # noqa: E402
from pipeline_processes import (  # noqa: E402
    Running,
    StockSide,
    queue_worker,
    sleeping_worker,
    stock_worker,
)

from omlx_producer import Producer  # noqa: E402
from omlx_producer.protocol import GenerationRequest  # noqa: E402
from omlx_worker.bench.machine import described  # noqa: E402
from omlx_worker.engine.interface import Engine  # noqa: E402
from omlx_worker.engine.loader import DEMO, load_engine, resolve  # noqa: E402
from omlx_worker.queue.embedded import EmbeddedRedis  # noqa: E402
from tests.helpers.fake_engine import FakeEngine  # noqa: E402
from tests.helpers.workers import ALIAS, SCRIPT  # noqa: E402

LOAD_SECONDS = 600.0
ENVIRONMENT = ("OPENBLAS_NUM_THREADS", "LD_PRELOAD")
SLOW_AMONG = 32
"""Where a lap with a slow consumer is added, as one of so many."""


def requests_of(count: int, args: argparse.Namespace) -> list[GenerationRequest]:
    """Held-out prompts, the same in every lap: new lengths would be compiled by the first side
    that meets them."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"][: args.prompt_characters] for line in lines]
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
            self._plain.name: lambda: self._plain.lap(requests),
            self._worker.name: lambda: self._worker.lap(requests),
        }
        if jobs == SLOW_AMONG:
            turns["one slow"] = lambda: self._worker.lap(requests, slow=True)
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
        worker = enter(self._worker_process(server.url))
        producer = enter(Producer(server.url))
        if not args.step:
            stock = enter(stock_worker(server.url, args.model))
            self._stock = StockSide(producer.connection, stock.pid)
        engine = self._engine()
        self._stack.callback(engine.close)
        _wait_until_served(producer, worker)
        redis = producer.connection.info("server")["process_id"]
        self._worker = WorkerSide(producer, server.url, worker=worker.pid, redis=redis)
        self._in_process, self._plain = InProcessSide(engine), PlainLoopSide(engine)

    def _worker_process(self, url: str) -> Running:
        args = self._args
        if args.step:
            return sleeping_worker(SCRIPT, url, args.step, args.max_batch)
        return queue_worker(url, args.model, ALIAS, args.mode, args.depth, args.max_batch)

    def _engine(self) -> Engine:
        args = self._args
        if args.step:
            return FakeEngine(args.max_batch, args.step)
        return load_engine(args.model, max_rows=args.max_batch, depth=args.depth)


def _wait_until_served(producer: Producer, worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LOAD_SECONDS
    while ALIAS not in producer.models():
        if worker.poll() is not None:
            sys.exit(f"the worker has ended with code {worker.returncode}; see what it wrote above")
        if time.monotonic() > deadline:
            sys.exit(f"the worker did not load the model within {LOAD_SECONDS:g} s")
        time.sleep(0.1)


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
    parser.add_argument("--markdown", type=Path, help="write a section for a page here")
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
        "command": " ".join([*environment, "python", "scripts/bench/pipeline.py", *sys.argv[1:]]),
        **described(),
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
        if args.markdown:
            args.markdown.write_text(page(results))
        show(results)


if __name__ == "__main__":
    main()
