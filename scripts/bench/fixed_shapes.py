"""How many texts depend on their company, and what do fixed shapes cost?

    python -m scripts.bench.fixed_shapes
    python -m scripts.bench.fixed_shapes --random llama-8b --dtype bfloat16

Every text is made twice, with a batch of ``--slots`` rows: in company, and again in another order
and with other neighbours, or with ``--alone`` by itself. Half of the texts are greedy, the others
seeded, some with filters or penalties. Prompts differ in length. A text parts if any of its tokens
differs. Without fixed shapes, prompts are read together in chunks of other sizes the second time,
as a worker does.

The price is the time of a step, with and without fixed shapes in turns, with all slots taken and
with one row.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.bench.prompts import heldout_prompts
from omlx_worker.bench.report import machine
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.device import for_device
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from scripts.bench.models import add_model_options, model_of

Texts = dict[str, list[int]]

SETTLE = 8
"""Steps before the clock starts."""


def sampling_of(number: int) -> Sampling:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.2},
    ]
    return Sampling(seed=number, **kinds[number % len(kinds)])


def decoder_of(network: nn.Module, args: argparse.Namespace, *, fixed: bool) -> RaggedDecoder:
    model = as_ragged(
        network, drafts=args.depth > 0, checks=False, kernels=for_device(Contest(fixed=fixed))
    )
    return RaggedDecoder(model, args.depth, args.lookup, fixed=args.slots if fixed else 0)


def texts_of(decoder: RaggedDecoder, rows: Sequence[RowRequest], slots: int, chunk: int) -> Texts:
    """Decode rows, as many at a time as there are slots.

    Args:
        chunk: tokens of a prompt that are read at a time, at most.
    """
    texts: Texts = {row.row_id: [] for row in rows}
    coming, running = list(rows), dict[str, int]()
    while coming or running:
        joining = [Row(coming.pop(0)) for _ in range(min(slots - len(running), len(coming)))]
        for row in joining:
            decoder.add(row)
        while left := {row: chunk for row in joining if row.left}:
            decoder.read(left)
        running |= {row.row_id: row.request.max_tokens for row in joining}
        for step in decoder.step():
            if step.row_id not in running:
                continue
            texts[step.row_id] += [sampled.token for sampled in step.tokens]
            if len(texts[step.row_id]) >= running[step.row_id]:
                del texts[step.row_id][running.pop(step.row_id) :]
                decoder.leave(step.row)
    return texts


def parted(
    network: nn.Module, rows: Sequence[RowRequest], args: argparse.Namespace, *, fixed: bool
) -> int:
    """How many texts are not the same the second time."""
    decoder = decoder_of(network, args, fixed=fixed)
    first = texts_of(decoder, rows, args.slots, 512)
    again = random.Random(1).sample(rows, len(rows))
    second = texts_of(decoder, again, 1 if args.alone else args.slots, 64)
    return sum(first[name] != text for name, text in second.items())


def step_times(decoder: RaggedDecoder, rows: Sequence[RowRequest], steps: int) -> float:
    """Milliseconds of a step with these rows."""
    running = [Row(row) for row in rows]
    for row in running:
        decoder.enter(row)
    for _ in range(SETTLE):
        decoder.step()
    began, began_process = time.perf_counter(), time.process_time()
    for _ in range(steps):
        decoder.step()
    wall, busy = time.perf_counter() - began, time.process_time() - began_process
    for row in running:
        decoder.leave(row)
    # The processor's own time, which other programs do not lengthen, where it does the work.
    return 1e3 * (busy if mx.default_device() == mx.cpu else wall) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--rows", type=int, default=256, help="texts")
    parser.add_argument("--tokens", type=int, default=128, help="a text")
    parser.add_argument("--slots", type=int, default=32, help="rows of a batch")
    parser.add_argument("--context", type=int, default=300, help="tokens of a prompt, at most")
    parser.add_argument("--depth", type=int, default=0, help="drafts of the model a step")
    parser.add_argument("--lookup", type=int, default=0, help="drafts that are looked up a step")
    parser.add_argument("--alone", action="store_true", help="make each text again by itself")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32, help="a lap")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    network, tokenizer, name = model_of(args)
    chance = random.Random(0)
    prompts = heldout_prompts(tokenizer, args.context, args.rows)
    rows = [
        RowRequest(str(n), prompt[: chance.randint(8, args.context)], args.tokens, sampling_of(n))
        for n, prompt in enumerate(prompts)
    ]
    how = "alone" if args.alone else "in other company"
    figures: dict[str, Any] = {"what": "fixed shapes", "model": name, **machine()}
    figures["command"] = shlex.join(["python", "-m", "scripts.bench.fixed_shapes", *sys.argv[1:]])
    print(f"{name}, {args.dtype}, {figures['device']}, {args.slots} slots, depth {args.depth}")
    sides = {"as rows need": False, "fixed shapes": True}
    for side, fixed in sides.items():
        count = parted(network, rows, args, fixed=fixed)
        figures[f"parted, {side}"] = count
        print(f"{side}: {count} of {len(rows)} texts part when made again {how}", flush=True)

    decoders = {side: decoder_of(network, args, fixed=fixed) for side, fixed in sides.items()}
    long = [
        RowRequest(str(n), prompts[n % len(prompts)], 1 << 14, sampling_of(n))
        for n in range(args.slots)
    ]
    for count in sorted({args.slots, 1}, reverse=True):
        laps: dict[str, list[float]] = {side: [] for side in sides}
        for lap in range(1 + args.laps):
            for side, decoder in decoders.items():
                milliseconds = step_times(decoder, long[:count], args.steps)
                if lap:  # the first one traces
                    laps[side].append(milliseconds)
        ratio = statistics.median(
            b / a for a, b in zip(laps["as rows need"], laps["fixed shapes"], strict=True)
        )
        figures[f"steps, {count} rows"] = laps | {"ratio": ratio}
        told = ", ".join(f"{side} {statistics.median(each):.2f}" for side, each in laps.items())
        print(f"{count} rows, ms a step: {told}; ratio {ratio:.2f}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    # MLX aborts a process that ends while its device is at work.
    mx.synchronize()


if __name__ == "__main__":
    main()
