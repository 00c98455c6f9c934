"""Layers that share an input, as one layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_PACKING = ("bits", "group_size", "mode")
"""What tells how a quantised layer's weights are packed."""


@dataclass(frozen=True)
class _Whole:
    """One layer made of several, and the views that became their weights."""

    layer: nn.Module
    weights: list[mx.array]


def side_by_side(layers: Sequence[Any]) -> list[Any]:
    """Layers whose outputs, concatenated, are those of ``layers``: neighbours of one kind are one.

    Concatenating packed weights is exact, so quantised layers are one too.

    The layers' own weights become views of the larger layer's weights, so nothing is held twice. A
    network that is wrapped again gets the same layers.
    """
    kinds = (list(alike) for _, alike in itertools.groupby(layers, _kind))
    return [_one(alike) if len(alike) > 1 else alike[0] for alike in kinds]


def _kind(layer: Any) -> tuple[Any, ...]:
    """What layers have in common whose weights can be concatenated."""
    if type(layer) not in (nn.Linear, nn.QuantizedLinear):
        return (id(layer),)
    packing = (getattr(layer, name, None) for name in _PACKING)
    return type(layer), *packing, *((name, part.dtype) for name, part in layer.items())


def _one(layers: Sequence[Any]) -> nn.Module:
    first = layers[0]
    known = getattr(first, "_whole", None)
    if known is not None and list(map(id, known.weights)) == [id(x.weight) for x in layers]:
        whole: nn.Module = known.layer
        return whole
    whole = nn.Module.__new__(type(first))
    nn.Module.__init__(whole)
    for name in _PACKING:
        if hasattr(first, name):
            setattr(whole, name, getattr(first, name))
    for name in first.parameters():
        whole[name] = mx.concatenate([layer[name] for layer in layers], axis=0)
        ends = list(itertools.accumulate(layer[name].shape[0] for layer in layers))
        for layer, view in zip(layers, mx.split(whole[name], ends[:-1], axis=0), strict=True):
            layer[name] = view
    mx.eval(whole.parameters(), [layer.parameters() for layer in layers])
    first._whole = _Whole(whole, [layer.weight for layer in layers])
    return whole
