#!/usr/bin/env python
"""Measure this engine's batch against mlx-lm's generators: same process, checkpoint and prompts.

    python scripts/bench/against_mlx_lm.py --json results.json
    python scripts/bench/against_mlx_lm.py --model PATH --rows 1 8 32 --contexts 256 8192

All sides of one setting take turns, several laps each, and a ratio is the median over the laps
of a side's tokens per second to those of mlx-lm's BatchGenerator in the same lap, so that what
else the machine is doing falls on all alike. ``--grow 4b`` makes the model in memory with
`scripts/grow_demo_model.py`. ``--then`` measures more settings in the same process, with options
of their own: ``--then "rows=8,32 contexts=8192 depths=0,3 laps=2"``. On Linux, preload OpenBLAS
for products that gain from more rows: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from machine import described
from mlx.utils import tree_flatten
from reading import Reading, read_by_mlx_lm, read_by_ragged
from sides import Drafting, MlxLmBatch, Prompt, Ragged, Side, StreamGenerate

from omlx_worker.engine.loader import DEMO, load, resolve
from omlx_worker.engine.models import RaggedModel, as_ragged

BASE = MlxLmBatch.name
DEEPEST = 3
"""Drafts that ``auto`` may choose."""

DISTINCT = 8
"""Prompts that are read; further rows decode copies of them, each with a seed of its own."""


@dataclass
class Measured:
    """One side at one setting.

    Attributes:
        laps: tokens per second of all rows together, a lap each.
        steps: of all laps, and ``seconds`` they took.
        peak: most bytes in use while decoding, without what the benchmark itself holds.
        depths: steps by the drafts that they verified.
    """

    side: str
    rows: int
    context: int
    temperature: float
    rule: str
    laps: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    peak: int = 0
    accepted: list[float] = field(default_factory=list)
    depths: dict[int, int] = field(default_factory=dict)


def prompts_of(
    model: RaggedModel, tokenizer: Any, context: int, count: int, chunk: int = 2048
) -> list[Prompt]:
    """Held-out code, cut at different places, read once."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    texts = [tokenizer.encode(json.loads(line)["prompt"] + "\n\n\n") for line in lines]
    prompts = []
    for index in range(count):
        turned = texts[index:] + texts[:index]
        tokens = list(itertools.islice(itertools.cycle(itertools.chain(*turned[::-1])), context))
        caches = model.new_prompt_cache()
        for begin in range(0, context - 1, chunk):
            end = min(begin + chunk, context - 1)
            following = mx.array(tokens[begin + 1 : end + 1])[None]
            model.prefill(mx.array(tokens[begin:end])[None], following, caches)
            mx.eval([cache.state for cache in caches])
        prompts.append(Prompt(tokens, caches))
    return prompts


def lap(side: Side, prompts: Sequence[Prompt], into: Measured, warm: int, tokens: int) -> None:
    """Decode ``tokens`` tokens a row and add what was seen."""
    mx.clear_cache()
    held = mx.get_active_memory()
    side.start(prompts, into.temperature, into.rule)
    for _ in range(warm):
        side.step()
    mx.reset_peak_memory()
    if isinstance(side, Ragged):
        side.drafting, side.depths = Drafting(), {}
    produced = steps = 0
    began = time.perf_counter()
    while produced < tokens * len(prompts):
        produced += side.step()
        steps += 1
    seconds = time.perf_counter() - began
    into.laps.append(produced / seconds)
    into.steps += steps
    into.seconds += seconds
    into.tokens += produced
    into.peak = max(into.peak, mx.get_peak_memory() - held)
    if isinstance(side, Ragged):
        drafting = side.drafting
        judged = [drafting.row_steps, *drafting.accepted]
        pairs = zip(judged, drafting.accepted, strict=False)
        into.accepted = [accepted / before for before, accepted in pairs if before]
        into.depths = side.depths
    side.stop()


def measure(
    sides: Sequence[Side], prompts: Sequence[Prompt], setting: dict[str, Any], args: Any
) -> list[Measured]:
    """All sides at one setting, in turns."""
    line = [Measured(side.name, **setting) for side in sides]
    failed: list[str] = []
    for side in sides:
        # The first lap compiles, and `auto` finds out what depths cost.
        warm = args.learn if side.name == "auto" else 4
        try:
            lap(side, prompts, Measured(side.name, **setting), warm, 4)
        except RuntimeError as error:
            print(side.name, setting, error, flush=True)
            failed.append(side.name)
    sides = [side for side in sides if side.name not in failed]
    line = [measured for measured in line if measured.side not in failed]
    for _ in range(args.laps):
        for side, measured in zip(sides, line, strict=True):
            lap(side, prompts, measured, args.warm, args.tokens)
    base = next((m for m in line if m.side == BASE), line[0])
    for measured in line:
        measured.ratios = [a / b for a, b in zip(measured.laps, base.laps, strict=True)]
        ms = 1000 * measured.seconds / measured.steps
        shares = " ".join(f"{share:.2f}" for share in measured.accepted if share)
        print(
            f"rows {measured.rows:2} context {measured.context:5} T {measured.temperature:g} "
            f"{measured.rule:7} {measured.side:15} {statistics.median(measured.laps):8.1f} tok/s "
            f"{ms:7.2f} ms/step {statistics.median(measured.ratios):5.2f} "
            f"({min(measured.ratios):.2f}-{max(measured.ratios):.2f}) "
            f"peak {measured.peak / 1e9:.2f} GB {shares}",
            file=sys.stderr,
            flush=True,
        )
    return line


def model_of(args: argparse.Namespace) -> tuple[nn.Module, Any, str]:
    """The network, the tokenizer and the model's name."""
    network, tokenizer, config = load(resolve(args.model))
    name = args.model
    if args.grow:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from grow_demo_model import grow

        network, _ = grow(network, config, args.grow)
        name = f"{args.model}, grown to the cost of {args.grow}"
    if args.dtype:
        network.set_dtype(getattr(mx, args.dtype))
    if args.bits:
        nn.quantize(network, group_size=64, bits=args.bits)
        name += f", {args.bits} bits"
    mx.eval(network.parameters())
    return network, tokenizer, name


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--grow", help="a size of scripts/grow_demo_model.py")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--bits", type=int, choices=[4, 8], help="quantise the weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", "auto"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rules", nargs="+", default=["coupled"])
    parser.add_argument("--tokens", type=int, default=64, help="a row and lap")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=4, help="steps before a lap's clock starts")
    parser.add_argument("--learn", type=int, default=80, help="steps for auto to learn from")
    parser.add_argument("--read", type=int, nargs="*", default=[512], help="prompts to time")
    parser.add_argument("--read-rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--then", action="append", default=[], help="further settings")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


class Sides:
    """Every side, made when it is first needed, so that what it compiled is compiled once."""

    def __init__(self, network: nn.Module, tokenizer: Any) -> None:
        layers = len(network.layers)
        self._network = network
        self._theirs: list[Side] = [
            StreamGenerate(network, tokenizer, layers),
            MlxLmBatch(network, layers),
        ]
        self._ours: dict[str, Side] = {}

    def at(self, rows: int, depths: Sequence[str]) -> list[Side]:
        for depth in depths:
            if depth not in self._ours:
                auto = depth == "auto"
                deepest = DEEPEST if auto else int(depth)
                self._ours[depth] = Ragged(self._network, deepest, auto=auto)
        return self._theirs[rows > 1 :] + [self._ours[depth] for depth in depths]


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


def lines(
    model: RaggedModel, tokenizer: Any, sides: Sides, args: argparse.Namespace
) -> Iterator[list[Measured]]:
    """All settings of some options, one after the other."""
    for context in args.contexts:
        distinct = prompts_of(model, tokenizer, context, min(max(args.rows), DISTINCT))
        for temperature in args.temperatures:
            for rule in args.rules if temperature else ["coupled"]:
                for rows in args.rows:
                    setting = {
                        "rows": rows,
                        "context": context,
                        "temperature": temperature,
                        "rule": rule,
                    }
                    prompts = list(itertools.islice(itertools.cycle(distinct), rows))
                    yield measure(sides.at(rows, args.depths), prompts, setting, args)


def main() -> None:
    args = parse()
    network, tokenizer, name = model_of(args)
    model = as_ragged(network)
    assert model is not None
    results: dict[str, Any] = {
        "what": "against_mlx_lm",
        "model": name,
        "weights": sum(w.nbytes for _, w in tree_flatten(network.parameters())),
        "dtype": str(model.dtype).removeprefix("mlx.core."),
        "command": " ".join(["python", "scripts/bench/against_mlx_lm.py", *sys.argv[1:]]),
        **described(),
        "decoding": [],
        "reading": [],
    }

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(results))

    readings: list[Reading] = []
    for length, rows in itertools.product(args.read, args.read_rows):
        prompts = [p.tokens for p in prompts_of(model, tokenizer, length, min(rows, DISTINCT))]
        readings += [read(network, prompts, args.laps) for read in (read_by_mlx_lm, read_by_ragged)]
        for reading in readings[-2:]:
            print(reading, file=sys.stderr, flush=True)
    results["reading"] = [asdict(reading) for reading in readings]
    sides = Sides(network, tokenizer)
    for part in [args, *(further(args, text) for text in args.then)]:
        for line in lines(model, tokenizer, sides, part):
            results["decoding"] += [asdict(measured) for measured in line]
            keep()
    keep()


if __name__ == "__main__":
    main()
