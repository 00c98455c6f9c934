"""How fast is a whole file of requests through `omlx-submit run`, beside mlx-lm with its rows?

    python -m scripts.bench.whole_file                               the demo model, 32 rows at once
    python -m scripts.bench.whole_file --model PATH --rows 500 100 20 --at-once 32 8 1

One worker for each mode on one Redis server of the script's own; one of them is busy at a time. A
lap is one file through one of them, or the same prompts and numbers of tokens through mlx-lm's
`BatchGenerator` in this process. Sides take turns, and ratios are taken within a lap. Prompts are
stretches of held-out Python, other ones in every lap, so that no prefix is left over. Laps begin
once the workers' warm-up is over. Every result must be there with all of its tokens.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.producer import Producer
from omlx_worker.bench.laps import in_turn
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.bench.report import machine
from omlx_worker.bench.sides import BATCH_GENERATOR
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.loader import load
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.processes import (
    idle_figures,
    submit,
    wait_until_idle,
    wait_until_served,
    worker,
)

FIXED = ("batched", "mtp")
MODES = (*FIXED, "hybrid", "auto")
CHARACTERS = (120, 700)
READ_TOGETHER = 8
"""Prompts that `BatchGenerator` reads at a time, which is its own default."""

COLUMNS = ("at once", "", "tokens/s (range)", "x mlx-lm (range)", "steps", "windows")
COLUMNS += ("traces", "contests", "rows/step", "tokens/row, step", "drafts accepted")
COUNTS = ("steps", "prompt_windows", "traces", "contests", "decode_rows", "drafted", "accepted")

Lap = dict[str, dict[str, Any]]
"""Tokens per second of each side, and what a worker counted."""


@dataclass(frozen=True)
class Asked:
    """A row: a prompt, and how many tokens it generates."""

    prompt: str
    tokens: int


def rows_of(lap: int, count: int, tokens: Sequence[int]) -> list[Asked]:
    """The rows of a lap, each of a length drawn from `CHARACTERS` and from ``tokens``."""
    chance, text = random.Random(lap), "\n\n\n".join(heldout_texts())
    rows = []
    for _ in range(count):
        length = chance.randint(*CHARACTERS)
        start = chance.randrange(len(text) - length)
        rows.append(Asked(text[start : start + length], chance.randint(*tokens)))
    return rows


class WorkerSide:
    """A worker that serves its mode's name, and files for it."""

    def __init__(self, mode: str, producer: Producer, url: str, folder: Path) -> None:
        self.name = mode
        self._producer, self._url, self._folder = producer, url, folder
        self._seen = idle_figures(producer, mode, 0)

    def lap(self, rows: Sequence[Asked], number: int) -> dict[str, Any]:
        name = f"{self.name}-{number}"
        source, results = self._folder / f"{name}.jsonl", self._folder / f"{name}-results.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for line in self._lines(rows)))
        seconds = submit(self._url, "run", source, "-o", results)
        tokens = _tokens_of(results, rows)
        seen = idle_figures(self._producer, self.name, self._seen.tokens + tokens)
        before, self._seen = self._seen, seen
        counts = {each: getattr(self._seen, each) - getattr(before, each) for each in COUNTS}
        return {"tokens_per_second": tokens / seconds, "tokens": tokens, **counts}

    def _lines(self, rows: Sequence[Asked]) -> Iterator[dict[str, Any]]:
        for index, row in enumerate(rows):
            body = {"model": self.name, "prompt": row.prompt, "max_completion_tokens": row.tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            line = {"custom_id": str(index), "method": "POST", "url": "/v1/completions"}
            yield line | {"body": body}


def _tokens_of(results: Path, rows: Sequence[Asked]) -> int:
    """The tokens of a complete file of results."""
    made = {}
    for line in map(json.loads, results.open()):
        made[int(line["custom_id"])] = line["response"]["body"]["usage"]["completion_tokens"]
    if made != {index: row.tokens for index, row in enumerate(rows)}:
        sys.exit(f"{results.name}: {len(made)} results of {len(rows)} rows, or too few tokens")
    return sum(made.values())


class MlxLmSide:
    """mlx-lm's generator in this process."""

    name = BATCH_GENERATOR

    def __init__(self, network: nn.Module, tokenizer: Any, at_once: int) -> None:
        self._network, self._tokenizer, self._at_once = network, tokenizer, at_once

    def lap(self, rows: Sequence[Asked], number: int) -> dict[str, Any]:  # noqa: ARG002
        tokens = left = sum(row.tokens for row in rows)
        began = time.perf_counter()
        made = BatchGenerator(
            self._network,
            completion_batch_size=self._at_once,
            prefill_batch_size=min(self._at_once, READ_TOGETHER),
        )
        with closing(made) as generator:
            prompts = [self._tokenizer.encode(row.prompt) for row in rows]
            generator.insert(prompts, [row.tokens for row in rows])
            while left > 0:
                left -= len(generator.next_generated())
        mx.synchronize()
        seconds = time.perf_counter() - began
        mx.clear_cache()
        return {"tokens_per_second": tokens / seconds, "tokens": tokens}


def measure(
    args: argparse.Namespace, network: nn.Module, tokenizer: Any, count: int, at_once: int
) -> Iterator[Lap]:
    """Laps of new workers, the warm-up first. Sides take turns in each."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(EmbeddedRedis(folder / "redis")).url
        producer = stack.enter_context(Producer(url))
        sides: list[WorkerSide | MlxLmSide] = [MlxLmSide(network, tokenizer, at_once)]
        for mode in args.modes:
            options = {"model": args.model, "mode": mode, "max-batch": at_once}
            env = {"OMLX_QUEUE_STATE_DIR": str(folder / "state")}
            # One after the other: what a start times is not disturbed by the next one.
            process = stack.enter_context(worker(url, mode, options, env))
            wait_until_served(producer, [mode], [process])
            wait_until_idle(process)
            sides.append(WorkerSide(mode, producer, url, folder))
        for number in range(args.laps + 1):
            rows = rows_of(number, count, args.tokens)
            turns = {side.name: side.lap(rows, number) for side in in_turn(sides, number)}
            yield {side.name: turns[side.name] for side in sides}


def show(points: Sequence[dict[str, Any]]) -> None:
    """A table of all sides; a worker's counts are those of a lap, on average."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    for point in points:
        for name in point["laps"][0]:
            told = "mlx-lm" if name == BATCH_GENERATOR else name
            table.add_row(str(point["at_once"]), told, *_cells(point["laps"], name))
        table.add_section()
    console = Console(width=max(Console().width, 120))
    console.print(table)
    for point in points:
        first = point["laps"][0]
        fixed = [mode for mode in FIXED if mode in first]
        if "auto" in first and fixed:
            better = max(fixed, key=lambda mode: statistics.median(_speeds(point["laps"], mode)))
            share = _spread(_ratios(point["laps"], "auto", better), ".3f")
            console.print(f"{point['at_once']} at once: auto makes {share} of {better}")


def _cells(laps: Sequence[Lap], name: str) -> list[str]:
    cells = [_spread(_speeds(laps, name), ".0f"), _spread(_ratios(laps, name, BATCH_GENERATOR))]
    if name == BATCH_GENERATOR:
        return cells
    total = {each: sum(lap[name][each] for lap in laps) for each in ("tokens", *COUNTS)}
    cells += [f"{total[each] / len(laps):.0f}" for each in COUNTS[:4]]
    cells.append(f"{total['decode_rows'] / total['steps']:.1f}")
    cells.append(f"{total['tokens'] / total['decode_rows']:.2f}")
    drafted = total["drafted"]
    return [*cells, f"{total['accepted'] / drafted:.0%} of {drafted}" if drafted else ""]


def _speeds(laps: Sequence[Lap], name: str) -> list[float]:
    return [lap[name]["tokens_per_second"] for lap in laps]


def _ratios(laps: Sequence[Lap], name: str, base: str) -> list[float]:
    pairs = zip(_speeds(laps, name), _speeds(laps, base), strict=True)
    return [own / other for own, other in pairs]


def _spread(values: Sequence[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*FIXED, "auto"])
    parser.add_argument("--at-once", type=int, nargs="+", default=[32], help="rows in a batch")
    parser.add_argument("--rows", type=int, nargs="+", default=[500], help="a file, for each")
    parser.add_argument("--tokens", type=int, nargs=2, default=(32, 160), help="fewest and most")
    parser.add_argument("--laps", type=int, default=3, help="after one that warms up")
    parser.add_argument("--json", type=Path, help="write the figures here, after every lap")
    args = parser.parse_args()
    if len(args.rows) != len(args.at_once):
        parser.error("--rows: give one number for each of --at-once")
    return args


def main() -> None:
    args = parse()
    network, tokenizer, _ = load(resolve(args.model))
    points: list[dict[str, Any]] = []
    command = shlex.join(["python", "-m", "scripts.bench.whole_file", *sys.argv[1:]])
    head = {"what": "whole_file", "model": args.model, "command": command, **machine()}
    for count, at_once in zip(args.rows, args.at_once, strict=True):
        point: dict[str, Any] = {"at_once": at_once, "rows": count, "warm_up": None, "laps": []}
        points.append(point)
        for lap in measure(args, network, tokenizer, count, at_once):
            kind = f"lap {len(point['laps']) + 1}" if point["warm_up"] else "warm-up"
            speeds = (f"{name} {side['tokens_per_second']:.0f}" for name, side in lap.items())
            print(f"{at_once} at once, {kind}, tokens/s:", ", ".join(speeds), flush=True)
            if point["warm_up"]:
                point["laps"].append(lap)
            else:
                point["warm_up"] = lap
            if args.json:
                args.json.write_text(json.dumps({**head, "points": points}, indent=1))
    show(points)


if __name__ == "__main__":
    main()
