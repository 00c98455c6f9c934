"""How fast does this engine decode beside mlx-lm's generators, by rows, depth and temperature?

    python -m scripts.bench.against_mlx_lm --json results.json
    python -m scripts.bench.against_mlx_lm --grow 4b --rows 1 8 32 --contexts 256 8192

Same process, checkpoint and prompts, which are read before the laps. A ratio is taken within a lap,
to `BatchGenerator`'s speed in it, or to the first depth's with ``--alone``, which leaves mlx-lm
out. ``--then "rows=8,32 contexts=8192 laps=2"`` measures more settings in the same process. Figures
are written as they come. A side that fails loses only its own, and the exit code is then 1.
``--read`` also times prompts.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from rich.console import Console

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.bench.laps import LapPlan, Measured, measure
from omlx_worker.bench.prompts import heldout_prompts
from omlx_worker.bench.report import machine, table_of
from omlx_worker.bench.sides import AUTO, DecoderSide, Side
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.ragged_model import Unsupported
from omlx_worker.engine.rows.request import Sampling
from scripts.bench.given_prompts import (
    GivenBatchGenerator,
    GivenDecoder,
    GivenStream,
    PromptCaches,
)
from scripts.bench.models import add_model_options, model_of
from scripts.bench.reading import read_by_mlx_lm, read_by_ragged

DEEPEST = 3
"""Drafts that ``auto`` may choose."""

LOOKUP = "lookup"
"""Among the depths: no drafts are judged, but every step looks for them."""

DISTINCT = 8
"""Prompts that are read; further rows decode copies of them, each with a seed of its own."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", AUTO])
    parser.add_argument("--alone", action="store_true", help="without mlx-lm's generators")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--tokens", type=int, default=48, help="a row and lap")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--settle", type=int, default=8, help="steps before a lap's clock starts")
    parser.add_argument("--learn", type=int, default=80, help="steps of auto before its first lap")
    parser.add_argument("--read", type=int, nargs="*", default=[512], help="prompts to time")
    parser.add_argument("--read-rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--then", action="append", default=[], help="further settings")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


class Sides:
    """Every side, made when it is first needed and kept, so that it compiles once."""

    def __init__(self, network: nn.Module, caches: PromptCaches, *, alone: bool) -> None:
        self._network = network
        self._caches = caches
        self._theirs: list[Side] = []
        if not alone:
            self._theirs = [GivenStream(network, caches), GivenBatchGenerator(network, caches)]
        self._ours: dict[str, Side] = {}

    def at(self, rows: int, depths: Sequence[str]) -> list[Side]:
        for depth in depths:
            if depth not in self._ours:
                self._ours[depth] = self._own(depth)
        return self._theirs[rows > 1 :] + [self._ours[depth] for depth in depths]

    def _own(self, depth: str) -> Side:
        if depth == LOOKUP:
            model = as_ragged(self._network, drafts=False)
            decoder = GivenDecoder(model, self._caches, 0, MAX_DRAFT_DEPTH)
            return DecoderSide(decoder, mode="batched", name=LOOKUP)
        deepest = DEEPEST if depth == AUTO else int(depth)
        model = as_ragged(self._network, drafts=deepest > 0)
        decoder = GivenDecoder(model, self._caches, deepest)
        return DecoderSide(decoder, mode="auto" if depth == AUTO else "mtp")


def further(args: argparse.Namespace, text: str) -> argparse.Namespace:
    """The options, some of them replaced: ``rows=8,32 laps=2``."""
    changed = dict(vars(args))
    for word in text.split():
        name, _, value = word.partition("=")
        old = changed[name]
        kind = type(old[0] if isinstance(old, list) else old)
        values = [kind(part) for part in value.split(",")]
        changed[name] = values if isinstance(old, list) else values[0]
    return argparse.Namespace(**changed)


class Results:
    """Figures of all settings, written to a file whenever there are new ones."""

    def __init__(self, head: dict[str, Any], path: Path | None) -> None:
        self._head = head
        self._path = path
        self._done: list[dict[str, Any]] = []
        self.reading: list[dict[str, Any]] = []

    def write(self, line: Sequence[dict[str, Any]] = ()) -> None:
        """Write the file, with a setting that is not complete."""
        if self._path:
            body = {"decoding": [*self._done, *line], "reading": self.reading}
            self._path.write_text(json.dumps({**self._head, **body}))

    def add(self, line: Sequence[dict[str, Any]]) -> None:
        self._done += line
        self.write()

    @property
    def failed(self) -> list[str]:
        """The sides that failed, by their rows."""
        return [f"{side['rows']} rows, {side['side']}" for side in self._done if side["failed"]]


def decode(
    tokenizer: Any, caches: PromptCaches, sides: Sides, args: argparse.Namespace, results: Results
) -> None:
    """Measure all settings of some options, one after the other."""
    console = Console(stderr=True)
    for context in args.contexts:
        distinct = heldout_prompts(tokenizer, context, min(max(args.rows), DISTINCT))
        caches.read(distinct)
        for temperature, rows in itertools.product(args.temperatures, args.rows):
            prompts = list(itertools.islice(itertools.cycle(distinct), rows))
            plan = LapPlan(args.laps, args.tokens, args.settle, args.learn, Sampling(temperature))
            figures: list[dict[str, Any]] = []
            for line, _ in measure(sides.at(rows, args.depths), prompts, plan):
                figures = [figures_of(measured, caches, prompts, plan) for measured in line]
                results.write(figures)
            results.add(figures)
            console.print(f"context {context}, temperature {temperature:g}")
            console.print(table_of(line))
            for measured in line:
                if measured.failed:
                    console.print(f"{rows} rows, {measured.side}: {measured.failed}")


def figures_of(
    measured: Measured, caches: PromptCaches, prompts: Sequence[list[int]], plan: LapPlan
) -> dict[str, Any]:
    """A side's figures, how it sampled, and as ``own`` its rows' cache bytes at a lap's end."""
    own = 0.0
    if measured.laps:
        decoded = plan.tokens + plan.settle * measured.tokens / measured.row_steps
        head = measured.side == AUTO or (measured.side.startswith("K=") and measured.side != "K=0")
        own = sum(caches.bytes_after(prompt, decoded, head=head) for prompt in prompts)
    temperature = plan.sampling.temperature
    return {**measured.to_json(), "temperature": temperature, "own": round(own)}


def read(network: nn.Module, tokenizer: Any, args: argparse.Namespace, results: Results) -> None:
    """Time how fast both read prompts."""
    readers: list[Callable[..., Any]] = [read_by_mlx_lm, read_by_ragged]
    for length, rows in itertools.product(args.read, args.read_rows):
        prompts = heldout_prompts(tokenizer, length, min(rows, DISTINCT))
        for reader in readers[args.alone :]:
            reading = reader(network, prompts, args.laps)
            print(reading, file=sys.stderr, flush=True)
            results.reading.append(asdict(reading))
            results.write()


def main() -> None:
    args = parse()
    network, tokenizer, name = model_of(args)
    try:
        model = as_ragged(network)
    except Unsupported as reason:
        sys.exit(f"{name}: it has no ragged form, because {reason}")
    head = {
        "what": "against_mlx_lm",
        "model": name,
        "weights": model.weight_bytes,
        "dtype": str(model.dtype).removeprefix("mlx.core."),
        "command": shlex.join(["python", "-m", "scripts.bench.against_mlx_lm", *sys.argv[1:]]),
        **machine(),
    }
    results = Results(head, args.json)
    caches = PromptCaches(network)
    sides = Sides(network, caches, alone=args.alone)
    decode(tokenizer, caches, sides, args, results)
    read(network, tokenizer, args, results)
    for text in args.then:
        decode(tokenizer, caches, sides, further(args, text), results)
    # MLX aborts a process that ends while its device is at work.
    mx.synchronize()
    if results.failed:
        sys.exit(f"failed: {'; '.join(results.failed)}")


if __name__ == "__main__":
    main()
