"""The implementations that a model's layers use, chosen once by its device and its shapes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from omlx_worker.engine.kernels import delta_kernel
from omlx_worker.engine.kernels.attention import Attention
from omlx_worker.engine.kernels.attention_kernel import AttentionKernel
from omlx_worker.engine.kernels.cpu.delta_rule import ProductRule
from omlx_worker.engine.kernels.cuda import net_inputs, products
from omlx_worker.engine.kernels.delta_kernel import DeltaKernel
from omlx_worker.engine.kernels.delta_rule import DeltaRule
from omlx_worker.engine.kernels.plain import products as plain
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.plain.delta_rule import PlainRule
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations

log = logging.getLogger(__name__)

_METAL_KERNEL = "OMLX_QUEUE_METAL_KERNEL"


@dataclass(frozen=True)
class Kernels:
    """The implementations of a layer's parts; by default the plain forms, for any shapes.

    Attributes:
        attention: attends to body and tail.
        rule: the gated delta rule.
        net_inputs: makes a net's inputs from mlx-lm's module.
        product: makes a `Product` of a layer.
        fuse: makes one `Product` of layers that share an input; None if they stay apart.
    """

    attention: Attention = field(default_factory=PlainAttention)
    rule: DeltaRule = field(default_factory=PlainRule)
    net_inputs: Callable[[Any], NetOperations] = NetOperations
    product: Callable[..., plain.Product] = plain.product
    fuse: Callable[..., plain.Product | None] = plain.apart


def attention_for_device() -> Attention:
    """Choose for the default device, for heads of any size."""
    if mx.default_device() == mx.cpu:
        return PlainAttention()
    if not mx.metal.is_available():
        return AttentionKernel("cuda")
    return AttentionKernel("metal") if _asked_for_metal() else PlainAttention()


def for_device(dk: int, dv: int) -> Kernels:
    """Choose for the default device.

    Args:
        dk, dv: sizes of the key and value heads of the model's gated delta nets.
    """
    if mx.default_device() == mx.cpu:
        return Kernels(rule=ProductRule())
    return for_metal(dk, dv) if mx.metal.is_available() else for_cuda(dk, dv)


def compiles() -> bool:
    """Whether `mx.compile` compiles: not on a CPU without g++, nor when it is turned off.

    MLX does not say. A function that is compiled runs only once for two calls of one shape.
    """
    runs = 0

    def count(array: mx.array) -> mx.array:
        nonlocal runs
        runs += 1
        return array

    probe, array = mx.compile(count), mx.zeros(1)
    probe(array)
    probe(array)
    return runs == 1


@contextmanager
def unfused() -> Iterator[None]:
    """Turn `mx.compile` off inside of the block.

    For work that gains nothing from it: MLX builds every fused kernel that it has not kept, on a
    CPU with the C++ compiler, one after another.
    """
    if not compiles():
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def for_metal(dk: int, dv: int) -> Kernels:
    """mlx-lm's kernel; with ``OMLX_QUEUE_METAL_KERNEL=1`` this project's, NOT yet run on Metal."""
    attention: Attention = PlainAttention()
    if _asked_for_metal():
        attention = AttentionKernel("metal")
        if _fits(_METAL_KERNEL, dk, dv, *delta_kernel.MULTIPLES):
            return Kernels(attention, DeltaKernel("metal"))
    fits = _fits("mlx-lm's", dk, dv, 32, 1)
    return Kernels(attention, PlainRule(gated_delta_kernel) if fits else PlainRule())


def _asked_for_metal() -> bool:
    return os.environ.get(_METAL_KERNEL) == "1"


def for_cuda(dk: int, dv: int) -> Kernels:
    """This project's kernels, each if it takes the shapes."""
    fits = _fits("the delta rule's", dk, dv, *delta_kernel.MULTIPLES)
    rule: DeltaRule = DeltaKernel("cuda") if fits else PlainRule()
    fits = _fits("the recurrent layers'", dk, dv, net_inputs.LANES, net_inputs.LANES)
    inputs = net_inputs.net_inputs if fits else NetOperations
    return Kernels(AttentionKernel("cuda"), rule, inputs, products.product, products.fuse)


def _fits(whose: str, dk: int, dv: int, keys: int, values: int) -> bool:
    """Whether these sizes are multiples of what a kernel needs; warns if they are not."""
    fits = dk % keys == 0 and dv % values == 0
    if not fits:
        log.warning(
            "%s kernel is not used: it takes key heads of a multiple of %d and value heads of a"
            " multiple of %d, and the model's are %d and %d; plain operations are slower",
            *(whose, keys, values, dk, dv),
        )
    return fits
