"""Measure this engine's batch against mlx-lm's generators: same process, checkpoint and prompts.

    python -m scripts.bench.against_mlx_lm --json results.json
    python -m scripts.bench.against_mlx_lm --model PATH --rows 1 8 32 --contexts 256 8192

All sides of one setting take turns, in another order each lap, and a ratio is the median over the
laps of a side's tokens per second to those of mlx-lm's BatchGenerator in the same lap, so that what
else the machine is doing falls on all alike. ``--alone`` leaves mlx-lm out, to hold depths against
one another in many laps. ``--grow 4b`` makes the model in memory with
`scripts.grown_model.grow`. ``--then`` measures more settings in the same process, with options
of their own: ``--then "rows=8,32 contexts=8192 depths=0,3 laps=2"``. Figures are written as they
come, and a side that fails loses only its own. On Linux, preload OpenBLAS for products that gain
from more rows: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
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
from mlx.utils import tree_flatten

from omlx_worker.bench.machine import described
from omlx_worker.engine.loader import DEMO, load, resolve
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.models.ragged_model import RaggedModel
from scripts.bench.measuring import Measured, measure
from scripts.bench.reading import Reading, read_by_mlx_lm, read_by_ragged
from scripts.bench.sides import MlxLmBatch, Prompt, Ragged, Side, StreamGenerate
from scripts.grown_model.grow import grow

DEEPEST = 3
"""Drafts that ``auto`` may choose."""

DISTINCT = 8
"""Prompts that are read; further rows decode copies of them, each with a seed of its own."""


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


def model_of(args: argparse.Namespace) -> tuple[nn.Module, Any, str]:
    """The network, the tokenizer and the model's name."""
    network, tokenizer, config = load(resolve(args.model))
    name = args.model
    if args.grow:
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
    parser.add_argument("--grow", help="a size of scripts.grown_model.grow")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--bits", type=int, choices=[4, 8], help="quantise the weights")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--depths", nargs="+", default=["0", "1", "2", "3", "auto"])
    parser.add_argument("--alone", action="store_true", help="without mlx-lm's generators")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rules", nargs="+", default=["coupled"])
    parser.add_argument("--tokens", type=int, default=48, help="a row and lap")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--settle", type=int, default=16, help="tokens before a lap's clock starts")
    parser.add_argument("--learn", type=int, default=3, help="laps for auto to learn from")
    parser.add_argument("--read", type=int, nargs="*", default=[512], help="prompts to time")
    parser.add_argument("--read-rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--then", action="append", default=[], help="further settings")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


class Sides:
    """Every side, made when it is first needed, so that what it compiled is compiled once.

    Args:
        alone: whether mlx-lm's are left out.
    """

    def __init__(self, network: nn.Module, tokenizer: Any, *, alone: bool = False) -> None:
        layers = len(network.layers)
        self._network = network
        self._theirs: list[Side] = []
        if not alone:
            stream = StreamGenerate(network, tokenizer, layers)
            self._theirs = [stream, MlxLmBatch(network, layers)]
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


def decode(
    model: RaggedModel,
    tokenizer: Any,
    sides: Sides,
    args: argparse.Namespace,
    done: list[Measured],
    keep: Callable[[], None],
) -> None:
    """All settings of some options, one after the other; ``done`` takes what comes of them."""
    settings = list(itertools.product(args.temperatures, args.rules, args.rows))
    for context in args.contexts:
        distinct = prompts_of(model, tokenizer, context, min(max(args.rows), DISTINCT))
        for temperature, rule, rows in settings:
            if temperature or rule == args.rules[0]:
                setting = (rows, context, temperature, rule if temperature else "coupled")
                prompts = list(itertools.islice(itertools.cycle(distinct), rows))
                present = sides.at(rows, args.depths)
                line = [Measured(side.name, *setting) for side in present]
                done += line
                measure(present, prompts, line, args, keep)


def read(
    network: nn.Module, model: RaggedModel, tokenizer: Any, args: argparse.Namespace
) -> list[Reading]:
    """How fast prompts are read, by both."""
    readings: list[Reading] = []
    for length, rows in itertools.product(args.read, args.read_rows):
        prompts = [p.tokens for p in prompts_of(model, tokenizer, length, min(rows, DISTINCT))]
        for reader in (read_by_mlx_lm, read_by_ragged):
            readings.append(reader(network, prompts, args.laps))
            print(readings[-1], file=sys.stderr, flush=True)
    return readings


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
        "command": shlex.join(["python", "scripts/bench/against_mlx_lm.py", *sys.argv[1:]]),
        **described(),
        "decoding": [],
        "reading": [],
    }
    done: list[Measured] = []

    def keep() -> None:
        if args.json:
            results["decoding"] = [asdict(m) | {"accepted": m.accepted} for m in done]
            args.json.write_text(json.dumps(results))

    sides = Sides(network, tokenizer, alone=args.alone)
    for part in [args, *(further(args, text) for text in args.then)]:
        decode(model, tokenizer, sides, part, done, keep)
        if part is args:
            readings = read(network, model, tokenizer, args)
            results["reading"] = [asdict(reading) for reading in readings]
            keep()


if __name__ == "__main__":
    main()
