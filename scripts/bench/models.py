"""The model of a benchmark, by options: any checkpoint, grown, random, cast or quantized."""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.loader import load
from scripts.bench.shapes import SHAPES, random_network, shape_of
from scripts.grown_model.grow import REAL_HEAD, SIZES, grow


def add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO, help="demo, a folder, or a Hugging Face id")
    parser.add_argument("--random", choices=list(SHAPES), help="random weights in this shape")
    parser.add_argument("--layers", type=int, help="layers of random weights")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add_source_options(parser)
    parser.add_argument("--grow", choices=list(SIZES), help="grow the demo model to this cost")
    parser.add_argument("--real-head", action="store_true", help=f"with --grow, {REAL_HEAD}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--bits", type=int, choices=[4, 8], help="quantize the weights")


def model_of(args: argparse.Namespace) -> tuple[nn.Module, Any, str]:
    """The network, the tokenizer and the model's name."""
    network, tokenizer, config = load(resolve(args.model))
    name = args.model
    if args.grow:
        network, _ = grow(network, config, args.grow, real_head=args.real_head)
        name = f"{args.model}, grown to the cost of {args.grow}"
        name += ", its head as a 27B's" if args.real_head else ""
    if args.random:
        network = random_network(shape_of(args.random, args.layers))
        name = f"random weights, {args.random}, {len(network.layers)} layers"
    if args.dtype:
        network.set_dtype(getattr(mx, args.dtype))
    if args.bits:
        nn.quantize(network, group_size=64, bits=args.bits)
        name += f", {args.bits} bits"
    mx.eval(network.parameters())
    return network, tokenizer, name
