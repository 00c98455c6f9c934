"""How fast do files of prompts go, beside another tree's worker? Through Redis, in turns.

    python -m scripts.bench.prompt_files --old TREE               500 rows of 50 to 300 tokens
    python -m scripts.bench.prompt_files --old TREE --file 2000 50 50
    python -m scripts.bench.prompt_files --old TREE --random 4b   weights in the shape of a 4B model

One worker of each tree on one Redis server of the script's own, without drafts. A lap is one file
through `omlx-submit run`, of this tree for both. Every lap has prompts of its own, random tokens,
so nothing is left over from the lap before; both trees get the same ones.

On Linux, preload OpenBLAS: LD_PRELOAD=.../openblas-pthread/libblas.so.3.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from omlx_producer.producer import Producer
from omlx_worker.bench.laps import in_turn
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.models import add_source_options
from scripts.bench.processes import submit, wait_until_served, worker
from scripts.bench.shapes import random_network, shape_of
from scripts.grown_model.grow import save

THIS = Path(__file__).parents[2]
VOCABULARY = 4000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_source_options(parser)
    parser.add_argument("--old", type=Path, required=True, help="another checkout")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument(
        "--file",
        type=int,
        nargs=3,
        action="append",
        metavar=("SHARED", "FEWEST", "MOST"),
        help="tokens that all prompts begin with, and of their own; repeatable (0 50 300)",
    )
    parser.add_argument("--tokens", type=int, default=64, help="generated for each row")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--laps", type=int, default=3)
    return parser.parse_args()


File = tuple[int, int, int]
"""Tokens that all prompts begin with, the fewest and the most of their own."""


def write_rows(path: Path, alias: str, args: argparse.Namespace, shape: File, lap: int) -> None:
    """A file of requests: a shared beginning, then tokens of each row's own."""
    common, fewest, most = shape
    chance = random.Random(repr((shape, lap)))
    shared = [chance.randrange(VOCABULARY) for _ in range(common)]
    with path.open("w") as file:
        for number in range(args.rows):
            own = [chance.randrange(VOCABULARY) for _ in range(chance.randint(fewest, most))]
            body = {"model": alias, "prompt": shared + own, "temperature": 0, "ignore_eos": True}
            body["max_completion_tokens"] = args.tokens
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")


def rows_per_second(
    url: str, alias: str, folder: Path, args: argparse.Namespace, shape: File, lap: int
) -> float:
    """Run a file; returns rows per second."""
    name = f"{alias}-{'-'.join(map(str, shape))}-{lap}"
    rows, results = folder / f"{name}.jsonl", folder / f"{name}-results.jsonl"
    write_rows(rows, alias, args, shape, lap)
    return args.rows / submit(url, "run", rows, "-o", results)


def main() -> None:
    args = parse()
    trees = {"old": args.old.resolve(), "new": THIS}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(EmbeddedRedis(folder / "redis")).url
        model = args.model
        if args.random:
            shape = shape_of(args.random, args.layers)
            save(random_network(shape), shape, folder / "model")
            model = str(folder / "model")
        processes = []
        for name, tree in trees.items():
            path = os.pathsep.join(str(tree / part) for part in ("producer", "worker"))
            kept = [path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            options = {"model": model, "mode": "batched", "max-batch": args.max_batch}
            env = {"PYTHONPATH": os.pathsep.join(kept), "OMLX_QUEUE_STATE_DIR": str(folder / name)}
            processes.append(stack.enter_context(worker(url, name, options, env)))
        producer = stack.enter_context(Producer(url))
        wait_until_served(producer, list(trees), processes)
        for lengths in args.file or [(0, 50, 300)]:
            compare(url, list(trees), folder, args, tuple(lengths))


def compare(
    url: str, names: list[str], folder: Path, args: argparse.Namespace, shape: File
) -> None:
    """Run files of one shape on both workers, a lap after one that warms up."""
    ratios = []
    for lap in range(args.laps + 1):
        speeds = {n: rows_per_second(url, n, folder, args, shape, lap) for n in in_turn(names, lap)}
        old, new = (speeds[name] for name in names)
        kind = "warm-up" if not lap else f"lap {lap}"
        print(f"{kind}: {new:.2f} rows/s, before {old:.2f}, ratio {new / old:.2f}", flush=True)
        ratios += [new / old] if lap else []
    common, fewest, most = shape
    print(
        f"{args.rows} rows of {common} shared and {fewest} to {most} own tokens, {args.tokens} "
        f"generated: {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
