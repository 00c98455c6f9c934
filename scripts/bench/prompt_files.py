"""How fast do files of prompts go, beside another tree's worker? Through Redis, in turns.

    python -m scripts.bench.prompt_files --old TREE               500 rows of 50 to 300 tokens
    python -m scripts.bench.prompt_files --old TREE --shared 2000 --own 50 50
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
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from omlx_producer.client import Producer
from omlx_worker.bench.laps import in_turn
from omlx_worker.queue.embedded import EmbeddedRedis
from scripts.bench.models import add_model_options, model_of
from scripts.bench.old_and_new import SHAPES
from scripts.bench.processes import wait_until_served, worker
from scripts.grown_model.grow import save

THIS = Path(__file__).parents[2]
VOCABULARY = 8000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--old", type=Path, required=True, help="another checkout")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--shared", type=int, default=0, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, nargs=2, default=[50, 300], help="fewest and most")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each row")
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--laps", type=int, default=3)
    return parser.parse_args()


def write_rows(path: Path, alias: str, args: argparse.Namespace, lap: int) -> None:
    """A file of requests: a shared beginning, then tokens of each row's own."""
    chance = random.Random(lap)
    shared = [chance.randrange(VOCABULARY) for _ in range(args.shared)]
    with path.open("w") as file:
        for number in range(args.rows):
            own = [chance.randrange(VOCABULARY) for _ in range(chance.randint(*args.own))]
            body = {"model": alias, "prompt": shared + own, "temperature": 0, "ignore_eos": True}
            body["max_completion_tokens"] = args.tokens
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            file.write(json.dumps(row | {"body": body}) + "\n")


def submit(url: str, alias: str, folder: Path, args: argparse.Namespace, lap: int) -> float:
    """Run a file; returns rows per second."""
    rows, results = folder / "rows.jsonl", folder / f"{alias}-{lap}.jsonl"
    write_rows(rows, alias, args, lap)
    command = [sys.executable, "-c", "from omlx_producer.cli.main import main; main()", "run"]
    command += [str(rows), "-o", str(results), "--redis-url", url]
    began = time.perf_counter()
    client = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - began
    if client.returncode:
        sys.exit(client.stderr)
    return args.rows / seconds


def main() -> None:
    args = parse()
    trees = {"old": args.old.resolve(), "new": THIS}
    speeds: dict[str, list[float]] = {name: [] for name in trees}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(EmbeddedRedis(folder / "redis")).url
        model = args.model
        if args.random:
            network, _, _ = model_of(args)
            save(network, SHAPES[args.random], folder / "model")
            model = str(folder / "model")
            del network
        processes = []
        for name, tree in trees.items():
            path = os.pathsep.join(str(tree / part) for part in ("producer", "worker"))
            kept = [path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            options = {"model": model, "mode": "batched", "max-batch": args.max_batch}
            env = {"PYTHONPATH": os.pathsep.join(kept), "OMLX_QUEUE_STATE_DIR": str(folder / name)}
            processes.append(stack.enter_context(worker(url, name, options, env)))
        producer = stack.enter_context(Producer(url))
        wait_until_served(producer, list(trees), processes)
        for lap in range(args.laps + 1):
            for name in in_turn(list(trees), lap):
                speed = submit(url, name, folder, args, lap)
                if lap:
                    speeds[name].append(speed)
            if lap:
                ratio = speeds["new"][-1] / speeds["old"][-1]
                new, old = speeds["new"][-1], speeds["old"][-1]
                print(
                    f"lap {lap}: {new:.2f} rows/s, before {old:.2f}, ratio {ratio:.2f}", flush=True
                )
    ratios = [new / old for new, old in zip(speeds["new"], speeds["old"], strict=True)]
    print(
        f"{args.rows} rows of {args.shared} shared and {args.own[0]} to {args.own[1]} own tokens, "
        f"{args.tokens} generated: {statistics.median(ratios):.2f} times as fast "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
