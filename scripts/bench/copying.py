"""How fast do jobs decode whose output copies spans of the prompt, by what drafts?

    python -m scripts.bench.copying --json results.json
    python -m scripts.bench.copying --grow 4b --dtype bfloat16 --rows 1 8

64 edits: a held-out Python file, the line "the same file with f renamed to g", and the beginning of
the copy, since the demo model follows no instruction but goes on with a copy. 64 ordinary prompts:
held-out beginnings. Greedy. The sides take turns group by group: no drafts, the model's head,
lookups, both; with drafts the depth is `auto`'s.
A ratio is taken within a group, to the head's speed in it, and the median over groups is told.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.bench.laps import LapPlan, Measured, in_turn, lap
from omlx_worker.bench.prompts import heldout_texts
from omlx_worker.bench.report import machine
from omlx_worker.bench.sides import DecoderSide
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import Sampling
from scripts.bench.models import add_model_options, model_of

DEPTH = 3
SIDES: dict[str, tuple[int, int]] = {
    "head": (DEPTH, 0),
    "plain": (0, 0),
    "lookup": (0, MAX_DRAFT_DEPTH),
    "both": (DEPTH, MAX_DRAFT_DEPTH),
}


def prompts_of(tokenizer: Any, kind: str, length: int, count: int) -> list[list[int]]:
    """Prompts of ``length`` tokens, each from another place of the held-out files."""
    text = "\n\n\n".join(heldout_texts())
    tokens = tokenizer.encode(text)
    size = length if kind == "ordinary" else (length - 40) * 3 // 4
    starts = [index * (len(tokens) - size) // count for index in range(count)]
    pieces = [tokens[start : start + size] for start in starts]
    if kind == "ordinary":
        return pieces
    return [edit_of(tokenizer, piece, length) for piece in pieces]


def edit_of(tokenizer: Any, piece: list[int], length: int) -> list[int]:
    """A file and as much of its edited copy as makes ``length`` tokens."""
    text: str = tokenizer.decode(piece)
    names = re.findall(r"def (\w+)", text) or re.findall(r"\b[a-z_]{4,}\b", text) or ["f"]
    line = f"\n\n\n# The same file, with {names[0]} renamed to {names[0]}_new:\n\n"
    copy = re.sub(rf"\b{names[0]}\b", f"{names[0]}_new", text)
    tokens: list[int] = tokenizer.encode(text + line + copy)
    return tokens[:length]


def run(
    network: nn.Module, prompts: Sequence[list[int]], rows: int, tokens: int, learn: int
) -> dict[str, Measured]:
    """Decode the prompts in groups of ``rows``, every side in turn.

    The first group is not counted: in its ``learn`` steps `auto` measures depths, as a worker does
    while it is idle.
    """
    sides = {
        name: DecoderSide(
            RaggedDecoder(as_ragged(network, drafts=depth > 0, checks=False), depth, lookup),
            mode="auto" if name != "plain" else "batched",
            name=name,
        )
        for name, (depth, lookup) in SIDES.items()
    }
    line = {name: Measured(name, rows, len(prompts[0])) for name in SIDES}
    plan = LapPlan(laps=1, tokens=tokens, settle=2, sampling=Sampling(temperature=0.0))
    groups = [prompts[at : at + rows] for at in range(0, len(prompts), rows)]
    for side in sides.values():
        lap(side, groups[0], replace(plan, settle=learn, tokens=1))
    for number, group in enumerate(groups[1:]):
        for name in in_turn(list(SIDES), number):
            line[name].add(*lap(sides[name], group, plan))
    for measured in line.values():
        base = line["head"].laps
        measured.ratios = [own / other for own, other in zip(measured.laps, base, strict=True)]
    return line


def table_of(lines: Sequence[tuple[str, dict[str, Measured]]]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in ("prompts", "rows", "drafts", "tok/s", "x head", "tok/step", "accepted"):
        table.add_column(name, justify="left" if name in ("prompts", "drafts") else "right")
    for kind, line in lines:
        for name, measured in line.items():
            judged = sum(measured.judged.values())
            table.add_row(
                *(kind, str(measured.rows), name),
                f"{measured.tokens / measured.seconds:.0f}",
                f"{statistics.median(measured.ratios):.2f}",
                f"{measured.tokens / measured.row_steps:.2f}",
                f"{sum(measured.kept.values()) / judged:.0%}" if judged else "",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96, help="a row")
    parser.add_argument("--prompt", type=int, default=320, help="tokens")
    parser.add_argument("--prompts", type=int, default=64, help="of each kind")
    parser.add_argument("--learn", type=int, default=200, help="steps before those counted")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    head = {"what": "copying", "model": name, **machine()}
    head["command"] = shlex.join(["python", "-m", "scripts.bench.copying", *sys.argv[1:]])
    lines: list[tuple[str, dict[str, Measured]]] = []
    for rows, kind in itertools.product(args.rows, ("edit", "ordinary")):
        prompts = prompts_of(tokenizer, kind, args.prompt, args.prompts + rows)
        lines.append((kind, run(network, prompts, rows, args.tokens, args.learn)))
        if args.json:
            figures = [
                {"prompts": kind, **measured.to_json()}
                for kind, line in lines
                for measured in line.values()
            ]
            args.json.write_text(json.dumps({**head, "decoding": figures}))
        Console().print(table_of(lines[-1:]))
    # MLX aborts a process that ends while its device is at work.
    mx.synchronize()


if __name__ == "__main__":
    main()
