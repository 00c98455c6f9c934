"""Layers that share an input, as one layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class _Whole:
    """One layer made of several, and the views that became their weights."""

    layer: nn.Module
    weights: list[mx.array]


def side_by_side(layers: Sequence[Any]) -> nn.Module | None:
    """One layer whose output is theirs, concatenated; None if they are of several kinds.

    The layers' own weights become views of its weights, so nothing is held twice. A network that
    is wrapped again gets the same layer.
    """
    first = layers[0]
    kinds = {(type(x), getattr(x, "bits", 0), getattr(x, "group_size", 0)) for x in layers}
    if len(kinds) > 1 or type(first) not in (nn.Linear, nn.QuantizedLinear):
        return None
    if any("bias" in layer for layer in layers):
        return None
    known = getattr(first, "_whole", None)
    if known is not None and all(
        was is layer.weight for was, layer in zip(known.weights, layers, strict=True)
    ):
        return known.layer
    whole = nn.Module.__new__(type(first))
    nn.Module.__init__(whole)
    for name in ("bits", "group_size", "mode"):
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
