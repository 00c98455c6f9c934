"""The model of a benchmark, by options: any checkpoint, grown, random, cast or quantized."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.loader import DEMO, load, resolve
from scripts.bench.old_and_new import SHAPES, random_network
from scripts.grown_model.grow import SIZES, grow


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO, help="demo, a folder, or a Hugging Face id")
    parser.add_argument("--grow", choices=list(SIZES), help="grow the demo model to this cost")
    parser.add_argument("--random", choices=list(SHAPES), help="random weights in this shape")
    parser.add_argument("--layers", type=int, help="layers of random weights")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--bits", type=int, choices=[4, 8], help="quantize the weights")


def model_of(args: argparse.Namespace) -> tuple[nn.Module, Any, str]:
    """The network, the tokenizer and the model's name."""
    network, tokenizer, config = load(resolve(args.model))
    name = args.model
    if args.grow:
        network, _ = grow(network, config, args.grow)
        name = f"{args.model}, grown to the cost of {args.grow}"
    if args.random:
        shape = copy.deepcopy(SHAPES[args.random])
        text = shape.get("text_config", shape)
        text["num_hidden_layers"] = args.layers or text["num_hidden_layers"]
        network = random_network(shape)
        name = f"random weights, {args.random}, {text['num_hidden_layers']} layers"
    if args.dtype:
        network.set_dtype(getattr(mx, args.dtype))
    if args.bits:
        nn.quantize(network, group_size=64, bits=args.bits)
        name += f", {args.bits} bits"
    mx.eval(network.parameters())
    return network, tokenizer, name
