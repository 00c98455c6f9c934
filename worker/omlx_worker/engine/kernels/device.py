"""The forms that a model's layers use on the default device."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.attention_kernel import AttentionKernel
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.contested import (
    ATTENTION,
    NET,
    RULE,
    Contested,
    products_of_few_rows,
)
from omlx_worker.engine.kernels.cpu.delta_rule import ProductRule
from omlx_worker.engine.kernels.delta_kernel import DeltaKernel
from omlx_worker.engine.kernels.forms import Kernels, plain_forms
from omlx_worker.engine.kernels.net_kernels import NetKernels
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations
from omlx_worker.engine.kernels.plain.products import Product
from omlx_worker.engine.kernels.source import Platform


def for_device(contest: Contest) -> Kernels:
    """The forms for the default device. On a GPU they compete."""
    plain = plain_forms(fixed=contest.fixed)
    if mx.default_device() == mx.cpu:
        return replace(plain, rule=ProductRule())
    platform: Platform = "metal" if mx.metal.is_available() else "cuda"

    def between(module: Any, fused: Product) -> Any:
        kernels = {"kernel": NetKernels(module, platform)}
        return Contested(NetOperations(module, fused), kernels, contest, NET)

    # How many registers and blocks a GPU has is known to it alone.
    attention = {
        f"kernel of {tile} queries in {blocks} blocks": AttentionKernel(platform, tile, blocks)
        for tile, blocks in product((2, 4), (256, 1024))
    }
    if contest.fixed:
        attention = {
            "kernel": AttentionKernel(platform, 2 if platform == "metal" else 4, fixed=True)
        }
    rule = {"kernel": DeltaKernel(platform)}
    return replace(
        plain,
        attention=Contested(plain.attention, attention, contest, ATTENTION),
        rule=Contested(plain.rule, rule, contest, RULE),
        between=between,
        product=products_of_few_rows(contest),
    )
