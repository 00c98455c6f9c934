"""Compare the speed of two source trees: prompts read, and steps with and without drafts.

    git worktree add /tmp/old COMMIT
    python -m scripts.bench.old_and_new --old /tmp/old --shape 4b --json figures.json

One process a tree, both alive, one of them busy at a time. The trees take turns lap by lap, in
alternating order. ``demo`` is the demo model; ``4b`` has random weights in the shape of a 4B
Qwen3.5, so its drafts are rejected, which changes the text but not the cost of a step.

What is measured, in milliseconds (a median over laps):

``prompt``     one prompt of that many tokens, read in one chunk by a decoder that may draft
``K=0``        a step of a decoder without drafts
``K=0 of 3``   a step without drafts of a decoder that may draft three tokens, as ``auto`` does
``K=3``        a step that verifies three drafts and makes three

A lap is 288 steps by default, which includes one fold of the attention tails.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

SETTLE, FOREVER = 4, 1 << 30
DEPTH = 3

_QWEN: dict[str, Any] = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "num_attention_heads": 16,
}

SHAPES: dict[str, dict[str, Any]] = {
    "4b": {
        "model_type": "qwen3_5",
        "text_config": _QWEN
        | {
            "model_type": "qwen3_5_text",
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
        },
    },
    # Ten of its forty layers, so that two trees fit one GPU.
    "35b-a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": _QWEN
        | {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2048,
            "intermediate_size": 512,
            "num_hidden_layers": 10,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "mtp_num_hidden_layers": 1,
        },
    },
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
}


# One tree, in a process of its own.


def first_of(*places: str) -> Any:
    """The first name that this tree has, each given as ``module:name``."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(import_module(f"omlx_worker.engine.{module}"), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"this tree has none of {', '.join(places)}")


def random_network(config: dict[str, Any]) -> Any:
    """A network with random weights, and with a head if it has one; bfloat16 on a GPU."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    with_head = first_of("drafts.mtp:with_head", "models.mtp:with_head")
    family, args = _get_classes(config)
    mx.random.seed(0)
    network = with_head(family)(args.from_dict(config))
    network.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    for _, weight in tree_flatten(network.parameters()):
        mx.eval(weight)  # one at a time: they are made in float32
    return network


def read(decoder: Any, name: str, tokens: int) -> int:
    """Read more of a row's prompt by this tree's interface; returns what is left."""
    try:
        left: int = decoder.prefill({name: tokens})[name]
    except TypeError:
        left = decoder.prefill(name, tokens)
    return left


class Tree:
    """A model on the engine of one tree."""

    def __init__(self, network: Any, vocabulary: int) -> None:
        self._network = network
        self._vocabulary = vocabulary
        self._decoders: dict[str, Any] = {}

    def decoder(self, kind: str) -> Any:
        """The decoder for one kind of step; it keeps its compiled steps."""
        if kind not in self._decoders:
            as_ragged = first_of("models.families:as_ragged", "models:as_ragged")
            made = first_of("ragged.decoder:RaggedDecoder", "ragged:RaggedDecoder")
            depth = 0 if kind == "K=0" else DEPTH
            # Older trees want to know whether the depth may change.
            known = "varies" in inspect.signature(made).parameters
            options = {"varies": kind == "K=0 of 3"} if known else {}
            model = as_ragged(self._network, drafts=depth > 0)
            self._decoders[kind] = made(model, depth, **options)
        return self._decoders[kind]

    def _row(self, name: str, length: int) -> Any:
        interface = import_module("omlx_worker.engine.interface")
        tokens = [(7 * place + 13 * int(name) + 5) % self._vocabulary for place in range(length)]
        return interface.Row(name, tokens, FOREVER, interface.Sampling(temperature=0.0))

    def prompt(self, length: int, repeats: int) -> float:
        decoder, seconds = self.decoder("K=0 of 3"), 0.0
        for number in range(repeats):
            # One token more is left unread, so that the row does not join the batch.
            decoder.add(self._row(str(number), length + 2))
            began = time.perf_counter()
            read(decoder, str(number), length)
            seconds += time.perf_counter() - began
            decoder.remove(str(number))
        return 1000 * seconds / repeats

    def steps(self, kind: str, rows: int, context: int, steps: int) -> float:
        import mlx.core as mx

        decoder = self.decoder(kind)
        names = [str(number) for number in range(rows)]
        for name in names:
            decoder.add(self._row(name, context))
            while read(decoder, name, 2048):
                pass
        depths = dict.fromkeys(names, 0) if kind == "K=0 of 3" else None
        for _ in range(SETTLE):
            decoder.step(depths)
        mx.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            decoder.step(depths)
        mx.synchronize()
        seconds = time.perf_counter() - began
        for name in names:
            decoder.remove(name)
        return 1000 * seconds / steps


def serve(args: argparse.Namespace) -> None:
    """Answer each request line with the milliseconds that it took, until there is no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not answer
    if args.shape == "demo":
        loader = import_module("omlx_worker.engine.loader")
        network, _, config = loader.load(args.demo)
        vocabulary = config["text_config"]["vocab_size"]
    else:
        shape = copy.deepcopy(SHAPES[args.shape])
        text = shape.get("text_config", shape)
        text |= {"num_hidden_layers": args.layers} if args.layers else {}
        network, vocabulary = random_network(shape), text["vocab_size"]
    tree = Tree(network, vocabulary)
    print(import_module("omlx_worker").__file__, file=out, flush=True)
    for line in sys.stdin:
        name, *values = json.loads(line)
        print(json.dumps(getattr(tree, name)(*values)), file=out, flush=True)


# Both trees.


class Side:
    """A process on one tree."""

    def __init__(self, tree: Path, args: argparse.Namespace, demo: Path) -> None:
        command = [sys.executable, __file__, "--serve", "--shape", args.shape, "--demo", str(demo)]
        command += ["--layers", str(args.layers)] if args.layers else []
        path = os.pathsep.join(str(tree / part) for part in ("producer", "worker"))
        environ = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        loaded = self._answer()
        if not Path(loaded).is_relative_to(tree):
            sys.exit(f"{tree}: Python took {loaded} instead")

    def ask(self, request: Sequence[Any]) -> float:
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a tree's process ended; its error is above")
        return line.strip()


def measure(
    sides: Sequence[Side], requests: dict[str, list[Any]], laps: int, told: Callable[[str], None]
) -> dict[str, list[list[float]]]:
    """Milliseconds by request, side and lap; a first lap compiles and does not count."""
    figures: dict[str, list[list[float]]] = {}
    for name, request in requests.items():
        figures[name] = [[] for _ in sides]
        for number in range(-1, laps):
            order = list(enumerate(sides))
            for index, side in order[::-1] if number % 2 else order:
                taken = side.ask(request)
                if number >= 0:
                    figures[name][index].append(taken)
        told(line_of(name, *figures[name]))
    return figures


def line_of(name: str, old: Sequence[float], new: Sequence[float]) -> str:
    ratios = sorted(b / a for a, b in zip(old, new, strict=True))
    before, after = statistics.median(old), statistics.median(new)
    return (
        f"{name:18} {before:10.3f} {after:10.3f} {after / before:10.3f}"
        f"   {ratios[0]:.3f}-{ratios[-1]:.3f}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--old", type=Path, help="root of the tree to compare with")
    parser.add_argument("--new", type=Path, default=here, help="default: this tree")
    parser.add_argument("--shape", choices=["demo", *SHAPES], default="demo")
    parser.add_argument("--layers", type=int, help="of the shape, instead of all")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="*", default=["K=0", "K=0 of 3", "K=3"])
    parser.add_argument("--prompts", type=int, nargs="*", default=[50, 200, 2000])
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of rows that step")
    parser.add_argument("--steps", type=int, default=288, help="of a lap")
    parser.add_argument("--repeats", type=int, default=8, help="prompts of a lap")
    parser.add_argument("--laps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--demo", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.serve:
        serve(args)
        return
    if args.old is None:
        sys.exit("--old: give the root of the tree to compare with")
    demo = args.new.resolve() / "worker/omlx_worker/demo_model"
    sides = [Side(tree.resolve(), args, demo) for tree in (args.old, args.new)]
    requests: dict[str, list[Any]] = {
        f"prompt {length}": ["prompt", length, args.repeats] for length in args.prompts
    }
    for rows in args.rows:
        for kind in args.kinds:
            requests[f"B={rows} {kind}"] = ["steps", kind, rows, args.context, args.steps]
    print(f"{args.shape}, ms     {'old':>15} {'new':>10} {'new/old':>10}   range", flush=True)
    figures = measure(sides, requests, args.laps, lambda line: print(line, flush=True))
    for side in sides:
        side.close()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
