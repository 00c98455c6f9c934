"""Mixtures of experts: whether a step sorts its tokens by expert, as measured on the device.

mlx-lm's `SwitchGLU` sorts from 64 assignments on, whatever the device. An assignment is one token
at one expert. Sorted or not, the products are the same; on a CUDA device the two forms are up to
2.8 times apart, either way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import wraps
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, _gather_sort, _scatter_unsort

log = logging.getLogger(__name__)

SECONDS = 1.0
"""Measuring ends after this time. Sizes that it did not reach keep mlx-lm's form."""
SIZES = (32, 64, 128, 256, 512, 1024, 2048)
"""Assignments for which the forms are measured. A step uses the form of the next larger size."""
_CHAIN, _REPEATS = 4, 3

Forms = dict[int, bool]
"""By number of assignments: whether to sort them."""


def choose_forms(model: nn.Module, dtype: mx.Dtype) -> None:
    """Measure both forms on the model's first switch layer and let all of them use the faster.

    A model that has been measured before keeps its choice.

    Args:
        dtype: of the activations.
    """
    layers = [part for _, part in model.named_modules() if isinstance(part, SwitchGLU)]
    if not layers or hasattr(layers[0], "forms"):
        return
    forms = measured(layers[0], dtype)
    for layer in layers:
        # MLX takes a plain dictionary for parameters.
        layer.forms = MappingProxyType(forms)
    _use_forms()
    log.debug("experts: tokens are sorted at these numbers of assignments: %s", forms)


def measured(
    layer: SwitchGLU, dtype: mx.Dtype, clock: Callable[[], float] = time.perf_counter
) -> Forms:
    """Time both forms, size by size, until `SECONDS` have passed."""
    ends = clock() + SECONDS
    forms = {}
    for size in SIZES:
        if clock() > ends:
            break
        seconds = {sort: _seconds(layer, size, dtype, sort, clock) for sort in (False, True)}
        forms[size] = seconds[True] < seconds[False]
    return forms


def _seconds(
    layer: SwitchGLU, size: int, dtype: mx.Dtype, sort: bool, clock: Callable[[], float]
) -> float:
    """The least time of a chain of products, each on the output of the one before."""
    experts = layer.gate_proj.weight.shape[0]
    indices = mx.random.randint(0, experts, (size, 1), key=mx.random.key(size))
    start = mx.random.normal((size, layer.gate_proj.input_dims), key=mx.random.key(0))
    start = start.astype(dtype)
    mx.eval(start, indices)
    times = []
    for _ in range(_REPEATS):
        began = clock()
        x = start
        for _ in range(_CHAIN):
            x = _run(layer, x, indices, sort)[:, 0]
        mx.eval(x)
        times.append(clock() - began)
    return min(times)


def _run(layer: SwitchGLU, x: mx.array, indices: mx.array, sort: bool) -> mx.array:
    """A switch layer in the given form: ``[..., D]`` and ``[..., M]`` to ``[..., M, D]``."""
    x = mx.expand_dims(x, (-2, -3))
    places, back = indices, None
    if sort:
        x, places, back = _gather_sort(x, indices)
    up = layer.up_proj(x, places, sorted_indices=sort)
    gate = layer.gate_proj(x, places, sorted_indices=sort)
    x = layer.down_proj(layer.activation(up, gate), places, sorted_indices=sort)
    if sort:
        x = _scatter_unsort(x, back, indices.shape)
    return x.squeeze(-2)


def _use_forms() -> None:
    """Let `SwitchGLU` look at its layer's ``forms``, if it has any."""
    plain: Any = SwitchGLU.__call__
    if hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def forward(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        size = next((size for size in getattr(self, "forms", ()) if size >= indices.size), None)
        if size is None:
            out: mx.array = plain(self, x, indices)
            return out
        return _run(self, x, mx.stop_gradient(indices), self.forms[size])

    SwitchGLU.__call__ = forward
