"""Random arguments on which the forms of a part are compared."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.delta_rule import Inputs, Kept
from omlx_worker.engine.kernels.pool import Pool
from omlx_worker.engine.kernels.window import Window


def sampled(value: Any, seed: int = 0) -> Any:
    """The same shapes with random numbers of an activation's size, on which any form is stable.

    Integers are copied. Nothing is computed yet. Of the arrays of ``value`` only those of integers
    are held.
    """
    if isinstance(value, Window):
        return value.filled()
    if isinstance(value, Inputs | Kept):
        named = enumerate(value._asdict().items())
        parts = {name: sampled(part, seed + n) for n, (name, part) in named}
        keys = parts["keys"] / mx.linalg.norm(parts["keys"], axis=-1, keepdims=True)
        gates = {"beta": mx.sigmoid(parts["beta"]), "decay": _decays(parts["decay"])}
        return value._replace(**parts | gates | {"keys": keys})
    if isinstance(value, Pool):
        return value._replace(arrays=sampled(value.arrays, seed))
    if isinstance(value, mx.array):
        if not mx.issubdtype(value.dtype, mx.floating):
            return value + mx.zeros((), value.dtype)
        key = mx.random.key(seed)
        return mx.random.normal(value.shape, value.dtype, scale=0.5, key=key)
    if isinstance(value, dict):
        return {name: sampled(part, seed + n) for n, (name, part) in enumerate(value.items())}
    if isinstance(value, tuple | list):
        return type(value)(sampled(part, seed + 10 * n) for n, part in enumerate(value))
    return value


def _decays(numbers: mx.array) -> mx.array:
    """Half of them near 1, where bfloat16 has no number: rounded, they would not decay at all."""
    decays = mx.sigmoid(numbers)
    return mx.where(numbers > 0, 1 - (1 - decays) / 256, decays)
