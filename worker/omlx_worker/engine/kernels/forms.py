"""The forms that the parts of a model's layers have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from omlx_worker.engine.kernels.attention import Attention
from omlx_worker.engine.kernels.delta_rule import DeltaRule
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.plain.delta_rule import PlainRule
from omlx_worker.engine.kernels.plain.fixed_attention import FixedAttention
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations
from omlx_worker.engine.kernels.plain.products import Product, product
from omlx_worker.engine.kernels.side_by_side import side_by_side


@dataclass(frozen=True)
class Kernels:
    """The forms of a layer's parts; by default the plain ones, for any device and shapes.

    Attributes:
        attention: attends to body and tail.
        rule: the gated delta rule.
        between: makes what a net computes around its rule, from mlx-lm's module and its
            projections as one product.
        product: makes a `Product` of a layer.
    """

    attention: Attention = field(default_factory=PlainAttention)
    rule: DeltaRule = field(default_factory=PlainRule)
    between: Callable[[Any, Product], NetOperations] = NetOperations
    product: Callable[..., Product] = product

    def fuse(self, layers: Sequence[Any], *, gated: bool = False) -> Product | None:
        """One product of layers that share an input; None if they are of several kinds."""
        first, *others = side_by_side(layers)
        return None if others else self.product(first, gated=gated)

    def joined(self, layers: Sequence[Any]) -> Product:
        """The outputs of layers that share an input, concatenated; neighbours of one kind are one
        product."""
        products = [self.product(layer) for layer in side_by_side(layers)]

        def run(x: mx.array, added: None = None) -> mx.array:  # noqa: ARG001
            return mx.concatenate([each(x) for each in products], axis=-1)

        return run if len(products) > 1 else products[0]

    def net(self, module: Any) -> NetOperations:
        """What mlx-lm's gated delta net computes, but for its rule and its output projection."""
        if type(module) is GatedDeltaNet:
            own = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
            weights = [weight for _, weight in tree_flatten([x.parameters() for x in own])]
            # One array would have the widest type of all its parts.
            if len({x.dtype for x in weights if mx.issubdtype(x.dtype, mx.floating)}) == 1:
                return self.between(module, self.joined(own))
        return NetOperations(module)


def plain_forms(*, fixed: bool) -> Kernels:
    """The plain forms; if ``fixed``, those whose sums for a row depend on that row alone."""
    return Kernels(FixedAttention()) if fixed else Kernels()
