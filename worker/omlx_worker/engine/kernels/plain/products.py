"""Products by MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu

Product = Callable[..., mx.array]
"""A linear layer: ``x`` ``[..., length]`` and, if given, ``added`` to ``[..., features]``."""

Packed = tuple[mx.array, mx.array, mx.array]
"""``[features, length * bits / 32]`` uint32, and scales and biases
``[features, length / group_size]``."""


def product(layer: Any, *, gated: bool = False) -> Product:
    """The layer itself; of an embedding, the scores of all tokens.

    Args:
        gated: the first half of the layer's output gates its second: ``silu(first) * second``.
    """
    apply = getattr(layer, "as_linear", layer)
    # With a bias or packed weights, MLX has no product that adds.
    adds = type(layer) is nn.Linear and "bias" not in layer

    def run(x: mx.array, added: mx.array | None = None) -> mx.array:
        if added is not None and adds and not gated:
            # As matrices: of batches MLX makes a product each, three times as slow with 8 rows.
            rows = mx.addmm(added.flatten(0, -2), x.flatten(0, -2), layer.weight.T)
            return rows.reshape(added.shape)
        return finished(apply(x), added, gated=gated)

    return run


def packed_product(
    x: mx.array,
    weights: Packed,
    added: mx.array | None = None,
    *,
    bits: int,
    group_size: int,
    gated: bool = False,
) -> mx.array:
    """``x @ weight.T`` of a matrix that MLX packed, plus ``added`` if given.

    Args:
        x: ``[..., length]``.
        added: shaped as the result.
        gated: the first half of the features gates the second, see `product`.
    """
    packed, scales, biases = weights
    out = mx.quantized_matmul(x, packed, scales, biases, True, group_size, bits)
    return finished(out, added, gated=gated)


def finished(out: mx.array, added: mx.array | None, *, gated: bool) -> mx.array:
    """What comes after a product, see `product`."""
    if gated:
        out = swiglu(*mx.split(out, 2, axis=-1))
    return out if added is None else added + out
