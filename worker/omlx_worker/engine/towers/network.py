"""What the networks of all towers need: their weights, and attention among the patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce

_FUSED = (64, 80, 128)
"""Head sizes of MLX's fused attention on Metal, to which smaller heads are padded."""
_QUERIES = 1024
"""Patches that attend at once: where attention is not fused, all their scores are in memory."""


def load(network: nn.Module, weights: Mapping[str, mx.array], config: Mapping[str, Any]) -> int:
    """Give a network its weights, in float32 without a GPU. Those with scales are packed.

    Args:
        config: of the checkpoint.

    Returns:
        Their bytes.

    Raises:
        ValueError: if they are not those of the network.
    """

    def packing(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        inputs = module.weight.shape[-1]
        packed, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
        group, bits = inputs // scales.shape[-1], 32 * packed.shape[-1] // inputs
        mode = (config.get("quantization") or {}).get("mode", "affine")
        return {"group_size": group, "bits": bits, "mode": mode}

    nn.quantize(network, class_predicate=packing)
    network.load_weights(list(weights.items()))
    if mx.default_device() == mx.cpu:
        network.set_dtype(mx.float32)
    network.eval()
    mx.eval(network.parameters())
    size: int = tree_reduce(lambda n, weight: n + weight.nbytes, network.parameters(), 0)
    return size


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attention of all patches to all, ``[1, H, L, D]`` each and the result."""
    head = queries.shape[-1]
    fused = next((size for size in _FUSED if head <= size), head)
    queries, keys, values = (
        mx.pad(each, [(0, 0)] * 3 + [(0, fused - head)]) for each in (queries, keys, values)
    )
    mixed = [
        mx.fast.scaled_dot_product_attention(some, keys, values, scale=scale)
        for some in mx.split(queries, range(_QUERIES, queries.shape[2], _QUERIES), axis=2)
    ]
    return mx.concatenate(mixed, axis=2)[..., :head]


def room_to_attend(heads: int, patches: int, bytes_each: int) -> int:
    """Bytes that `attend` takes in passing, about: thrice the scores, where it is not fused."""
    if mx.default_device() != mx.cpu:
        return 0
    return 3 * heads * min(patches, _QUERIES) * patches * bytes_each
