"""A model of mlx-lm whose layers run as the products of a device.

Its modules are copies that share their arrays with the model's own, which stay as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.products import Product


def copied(model: nn.Module) -> Any:
    """Copies of a model's modules, with the same arrays and the same linear layers."""
    return _copied(model, {})


def serve_products(module: Any, kernels: Kernels) -> None:
    """Let a copied module's own packed layers run as products of the kernels.

    Layers called ``gate_proj`` and ``up_proj``, which a module calls on the same input, run as one
    product, packed or not, if they are of one kind.
    """
    layers = {name: layer for name, layer in module.items() if type(layer) in _SERVED}
    served = {
        name: _served(layer, kernels.product(layer))
        for name, layer in layers.items()
        if type(layer) is not nn.Linear
    }
    if "gate_proj" in layers and "up_proj" in layers:
        pair = ("gate_proj", "up_proj")
        served |= zip(pair, run_together([layers[name] for name in pair], kernels), strict=False)
    dict.update(module, served)


def run_together(layers: Sequence[Any], kernels: Kernels) -> Iterator[Any]:
    """Layers in place of those that a module calls on the same input: they run as one product.

    The first one to be called computes all of them, and the others take their parts of it. None
    in place of layers of several kinds.
    """
    product = kernels.fuse(layers)
    if product is not None:
        shared = _Shared(product, [layer.weight.shape[0] for layer in layers])
        for index, layer in enumerate(layers):
            yield _served(layer, partial(shared.output, index))


class _Shared:
    """The product of several layers, and its output until each of them has been called."""

    def __init__(self, product: Product, features: Sequence[int]) -> None:
        self._product = product
        self._ends = list(itertools.accumulate(features))[:-1]
        self._input: mx.array | None = None
        self._outputs: dict[int, mx.array] = {}

    def output(self, index: int, x: mx.array) -> mx.array:
        if x is not self._input or index not in self._outputs:
            self._input = x
            self._outputs = dict(enumerate(mx.split(self._product(x), self._ends, axis=-1)))
        out = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return out


def _copied(part: Any, known: dict[int, Any]) -> Any:
    """A part of a module.

    Args:
        known: copies by the identities of modules, since some are parts of several.
    """
    if isinstance(part, nn.Module):
        if type(part) in _SERVED:
            return part
        if id(part) not in known:
            known[id(part)] = made = copy(part)
            dict.update(made, {name: _copied(each, known) for name, each in part.items()})
        return known[id(part)]
    if isinstance(part, dict):
        return {name: _copied(each, known) for name, each in part.items()}
    if isinstance(part, list):
        return [_copied(each, known) for each in part]
    return part


def _served(layer: Any, product: Product) -> Any:
    """The layer, but for its product."""
    made = copy(layer)
    made.__class__ = _SERVED[type(layer)]
    made._product = product
    return made


def _call(layer: Any, x: mx.array) -> mx.array:
    out: mx.array = layer._product(x)
    return out


_SERVED = {
    kind: type(kind.__name__, (kind,), {name: _call})
    for kind, name in (
        (nn.Linear, "__call__"),
        (nn.QuantizedLinear, "__call__"),
        (nn.QuantizedEmbedding, "as_linear"),
    )
}
"""The classes of layers that run as other products."""
