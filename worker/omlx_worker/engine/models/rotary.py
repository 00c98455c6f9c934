"""Attention with rotary positions as mlx-lm's modules have it: its heads, and a ragged forward.

Families share this forward but for names, norms, sinks and limits, see `STANDARD`. Its projections
are one product, and one kernel norms and rotates queries and keys and writes the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import (
    dots1,
    ernie4_5,
    ernie4_5_moe,
    gear,
    gemma,
    gemma2,
    gemma3_text,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoe,
    helium,
    lfm2,
    lfm2_moe,
    llama,
    mimo,
    mixtral,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    starcoder2,
)
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.attention import Heads, Rope
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.products import Product
from omlx_worker.engine.kernels.window import Window

STANDARD = {
    *(dots1.Dots1Attention, ernie4_5.Attention, ernie4_5_moe.Attention, gear.Attention),
    *(gemma.Attention, gemma2.Attention, gemma3_text.Attention, glm4.Glm4Attention),
    *(glm4_moe.Attention, gpt_oss.AttentionBlock, granite.Attention, helium.HeliumAttention),
    *(granitemoe.GraniteMoeAttention, lfm2.Attention, lfm2_moe.Attention, llama.Attention),
    *(mimo.Attention, mixtral.MixtralAttention, phi3.Attention, qwen2.Attention),
    *(qwen2_moe.Attention, qwen3.Attention, qwen3_moe.Attention, seed_oss.Attention),
    starcoder2.Attention,
}
"""Modules that do only this: project, norm heads if they have norms, rotate, attend, project."""

_AROUND_ONE = (gear.GearRMSNorm, gemma3_text.RMSNorm)
"""Norms that multiply by one plus their weights."""


@dataclass(frozen=True)
class _Parts:
    """Of one module: its heads, and its projections."""

    heads: Heads
    into: Product
    out: Product


def serve_rotary(module: Any, kernels: Kernels) -> None:
    """Get a module ready for `attend`."""
    if "qkv_proj" in module:
        into = kernels.product(module.qkv_proj)
    else:
        into = kernels.joined([module.q_proj, module.k_proj, module.v_proj])
    out = _first(module, "o_proj", "out_proj")
    module._parts = _Parts(heads_of(module), into, kernels.product(out))


def attend(
    module: Any, x: mx.array, cache: AttentionCache, window: Window, sliding: int
) -> mx.array:
    """The forward of a module that `serve_rotary` got ready: ``[S, W, hidden]`` in and out."""
    parts: _Parts = module._parts
    queries = cache.prepare(parts.into(x), parts.heads, window)
    scale: float = _first(module, "scale", "sm_scale")
    softcap = getattr(module, "attn_logit_softcapping", None) or 0.0
    mixed = cache.attend(
        queries, window, scale, sliding=sliding, sinks=module.get("sinks"), softcap=softcap
    )
    return parts.out(mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1))


def heads_of(module: Any, *, gated: bool = False) -> Heads:
    """The heads of a module with rotary positions."""
    queries = _first(module, "n_heads", "num_heads", "num_attention_heads")
    keys = _first(module, "n_kv_heads", "num_key_value_heads")
    out = _first(module, "o_proj", "out_proj")
    width: int = out.weight.shape[1]
    if "scales" in out:
        width = width * 32 // out.bits
    norms: dict[str, Any] = {}
    if norm := _first(module, "q_norm", "q_layernorm"):
        key_norm = _first(module, "k_norm", "k_layernorm")
        norms = {"query_norm": _weight(norm), "key_norm": _weight(key_norm), "epsilon": norm.eps}
    return Heads(queries, keys, width // queries, rope_of(module.rope), gated, **norms)


def _first(module: Any, *names: str) -> Any:
    """The first of these attributes that a module has; None if it has none."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _weight(norm: Any) -> mx.array:
    weight: mx.array = 1.0 + norm.weight if isinstance(norm, _AROUND_ONE) else norm.weight
    mx.eval(weight)  # once, not in every step
    return weight


def rope_of(rope: Any) -> Rope:
    if type(rope) is nn.RoPE:
        exponents = mx.arange(0, rope.dims, 2, dtype=mx.float32) / rope.dims
        periods = rope.base**exponents / rope.scale
        mx.eval(periods)  # once, not in every step
        return Rope(rope, rope.dims, periods, rope.traditional)
    if type(rope) is Llama3RoPE:
        return Rope(rope, rope.dims, rope._freqs, rope.traditional)
    if type(rope) is YarnRoPE:
        return Rope(rope, rope.dims, rope._freqs, rope.traditional, rope.mscale)
    if type(rope) is SuScaledRoPE:
        return Rope(rope, rope.dim, rope._freqs, factor=rope._scale)
    return Rope(rope)
