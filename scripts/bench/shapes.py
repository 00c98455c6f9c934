"""Random weights in the shapes of published models: a step costs what theirs does."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from omlx_worker.engine.models.mtp import with_head

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

_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")

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
    # Ten of its forty layers, so that two workers fit one GPU.
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
    # What 32 layers cost the host and next to nothing else, for counts on a CPU.
    "stand-in": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 8192,
        "max_position_embeddings": 32_768,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
}


def shape_of(name: str, layers: int | None) -> dict[str, Any]:
    """A configuration, with its own number of layers or another."""
    shape = copy.deepcopy(SHAPES[name])
    if layers:
        shape.get("text_config", shape)["num_hidden_layers"] = layers
    return shape


def random_network(config: dict[str, Any]) -> nn.Module:
    """A network with random weights, and with a head if it has one; bfloat16 on a GPU.

    What a layer adds to its input is smaller the more layers there are, as at the start of GPT-2's
    training. Otherwise roundings grow so much in forty layers that no two forms of them agree.
    """
    family, args = _get_classes(config)
    mx.random.seed(0)
    network = with_head(family)(args.from_dict(config))
    network.set_dtype(mx.float32 if mx.default_device() == mx.cpu else mx.bfloat16)
    smaller = (2 * len(network.layers)) ** -0.5
    for path, weight in tree_flatten(network.parameters()):
        if path.endswith(_ADDING):
            weight *= smaller
        mx.eval(weight)  # one at a time: they are made in float32
    return network
