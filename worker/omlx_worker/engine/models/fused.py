"""Layers of the Qwen3.5 family in fewer and larger kernels, for CUDA.

A step is many small kernels, each of a few microseconds of which its work is a fraction. Here
projections of the same input are one product, with its neighbours inside (the activation of an
MLP, the sum with the residual stream), and a gated delta net is a product, three kernels and a
product. What is computed is what `omlx_worker.engine.models.layers` says.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.qwen3_5 import GatedDeltaNet
from mlx_lm.models.qwen3_next import Qwen3NextMLP

from omlx_worker.engine.kernels import net_inputs, platform, skinny_product
from omlx_worker.engine.kernels.delta_rule import Kept, log_decay, read, replay_and_run
from omlx_worker.engine.ragged.recurrent_cache import RecurrentCache


@dataclass(frozen=True)
class Fused:
    """The fused projections of one layer; None where it keeps its own.

    Attributes:
        net: qkv, z, b and a of a gated delta net.
        attention: queries with their gate, keys and values.
        mlp: gate and up.
    """

    net: nn.Module | None = None
    attention: nn.Module | None = None
    mlp: nn.Module | None = None

    @classmethod
    def of(cls, layer: Any, dtype: mx.Dtype) -> Fused:
        """Put a layer's projections side by side, where the platform gains from it.

        The layer's own weights become views of the fused ones: nothing is held twice, also when
        a network is wrapped again.
        """
        if platform.backend() != "cuda":
            return cls()
        net = attention = mlp = None
        if type(layer.mlp) is Qwen3NextMLP:
            mlp = side_by_side([layer.mlp.gate_proj, layer.mlp.up_proj])
        if not layer.is_linear:
            own = layer.self_attn
            attention = side_by_side([own.q_proj, own.k_proj, own.v_proj])
        elif type(layer.linear_attn) is GatedDeltaNet and net_inputs.runs(layer.linear_attn, dtype):
            own = layer.linear_attn
            net = side_by_side([own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a])
        return cls(net, attention, mlp)


def side_by_side(layers: Sequence[Any]) -> nn.Module | None:
    """One layer whose output is theirs, one after the other; None where they are of many kinds."""
    kinds = {(type(x), getattr(x, "bits", 0), getattr(x, "group_size", 0)) for x in layers}
    kind, _, _ = next(iter(kinds))
    if len(kinds) > 1 or kind not in (nn.Linear, nn.QuantizedLinear):
        return None
    if any("bias" in layer for layer in layers):
        return None
    known = getattr(layers[0], "_side_by_side", None)
    if known is not None and known.holds(layers):
        return known.whole
    whole = nn.Module.__new__(kind)
    nn.Module.__init__(whole)
    for name in ("bits", "group_size", "mode"):
        if hasattr(layers[0], name):
            setattr(whole, name, getattr(layers[0], name))
    for name in _parts(layers[0]):
        whole[name] = mx.concatenate([layer[name] for layer in layers], axis=0)
        ends = list(itertools.accumulate(layer[name].shape[0] for layer in layers))
        for layer, view in zip(layers, mx.split(whole[name], ends[:-1], axis=0), strict=True):
            layer[name] = view
    mx.eval(whole.parameters(), [layer.parameters() for layer in layers])
    layers[0]._side_by_side = _SideBySide(whole, [layer["weight"] for layer in layers])
    return whole


@dataclass(frozen=True)
class _SideBySide:
    """What layers were put side by side as, and their weights then, in case they change."""

    whole: nn.Module
    weights: list[mx.array]

    def holds(self, layers: Sequence[Any]) -> bool:
        pairs = zip(self.weights, layers, strict=False)
        return len(self.weights) == len(layers) and all(w is x["weight"] for w, x in pairs)


def _parts(layer: nn.Module) -> list[str]:
    return [name for name in ("weight", "scales", "biases") if name in layer]


def product(layer: Any, x: mx.array, added: mx.array | None = None) -> mx.array:
    """A linear layer, and what is to be added to its output."""
    if skinny_product.takes(layer, x):
        return skinny_product.product(layer.weight, x, added)
    out: mx.array = layer(x)
    return out if added is None else added + out


def scores(embedding: Any, x: mx.array) -> mx.array:
    """How well each token's embedding fits, where the output projection is tied to them."""
    if skinny_product.takes(embedding, x):
        return skinny_product.product(embedding.weight, x)
    out: mx.array = embedding.as_linear(x)
    return out


def mlp(module: Any, fused: Fused, x: mx.array, added: mx.array) -> mx.array:
    """A layer's MLP, added to the residual stream."""
    if fused.mlp is None:
        out: mx.array = module(x)
        return added + out
    if skinny_product.takes(fused.mlp, x):
        opened = skinny_product.product(fused.mlp.weight, x, gated=True)
    else:
        opened = swiglu(*mx.split(fused.mlp(x), 2, axis=-1))
    return product(module.down_proj, opened, added)


def gated_delta_net(
    module: Any,
    fused: nn.Module,
    x: mx.array,
    cache: RecurrentCache,
    accepted: mx.array,
    added: mx.array,
) -> mx.array:
    """`layers.gated_delta_net`, added to the residual stream."""
    projected = product(fused, x)
    past = cache.kept[0] if cache.kept else None
    kept = Kept(*cache.kept[1:]) if cache.kept else None
    window, conv = net_inputs.prepare(
        module, projected, cache.conv, past, accepted, commit_first=True
    )
    out, state = replay_and_run(window, kept, accepted, cache.state)
    cache.conv, cache.state = conv, state
    cache.kept = [projected, *window.kept]
    return product(module.out_proj, net_inputs.gated_norm(module, out, projected), added)


def gated_delta_net_of_prompt(module: Any, fused: nn.Module, x: mx.array, cache: Any) -> mx.array:
    """`layers.gated_delta_net_of_prompt`."""
    projected = product(fused, x)
    conv, state = cache[0], cache[1]
    if conv is None:
        conv = mx.zeros((1, module.conv_kernel_size - 1, module.conv_dim), x.dtype)
        state = mx.zeros((1, module.num_v_heads, module.head_v_dim, module.head_k_dim), mx.float32)
    nothing = mx.zeros((1,), mx.int32)
    prompt, cache[0] = net_inputs.prepare(
        module, projected, conv, None, nothing, commit_first=False
    )
    decays = log_decay(module, projected[..., -module.num_v_heads :])
    out, cache[1] = read(prompt, decays, state)
    return product(module.out_proj, net_inputs.gated_norm(module, out, projected))
