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


def side_by_side(layers: Sequence[Any]) -> nn.Module | None:
    """One layer whose output is theirs, concatenated; None if they are of several kinds.

    Concatenating packed weights is exact, so quantised layers are one too.

    The layers' own weights become views of its weights, so nothing is held twice. A network that
    is wrapped again gets the same layer.
    """
    first = layers[0]
    kinds = {(type(x), *(getattr(x, name, None) for name in _PACKING), "bias" in x) for x in layers}
    if len(kinds) > 1 or type(first) not in (nn.Linear, nn.QuantizedLinear):
        return None
    known = getattr(first, "_whole", None)
    if known is not None and all(
        was is layer.weight for was, layer in zip(known.weights, layers, strict=True)
    ):
        return known.layer
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
