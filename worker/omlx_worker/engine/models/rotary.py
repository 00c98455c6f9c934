"""Attention with rotary positions as mlx-lm's modules have it: its heads, and a ragged forward.

Families share this forward but for names, norms and sinks, see `STANDARD`. Its projections are one
product, and one kernel norms and rotates queries and keys and writes the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import glm4, gpt_oss, granite, llama, phi3, qwen2, qwen3, qwen3_moe
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.kernels.attention import Heads, Rope
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.products import Product
from omlx_worker.engine.kernels.window import Window

STANDARD = {
    *(glm4.Glm4Attention, gpt_oss.AttentionBlock, granite.Attention, llama.Attention),
    *(phi3.Attention, qwen2.Attention, qwen3.Attention, qwen3_moe.Attention),
}
"""Modules that do only this: project, norm heads if they have norms, rotate, attend, project."""


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
    module._parts = _Parts(heads_of(module), into, kernels.product(module.o_proj))


def attend(
    module: Any, x: mx.array, cache: AttentionCache, window: Window, sliding: int
) -> mx.array:
    """The forward of a module that `serve_rotary` got ready: ``[S, W, hidden]`` in and out."""
    parts: _Parts = module._parts
    queries = cache.prepare(parts.into(x), parts.heads, window)
    scale = module.sm_scale if "sinks" in module else module.scale
    mixed = cache.attend(queries, window, scale, sliding=sliding, sinks=module.get("sinks"))
    return parts.out(mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1))


def heads_of(module: Any, *, gated: bool = False) -> Heads:
    """The heads of a module with rotary positions."""
    queries = _first(module, "n_heads", "num_attention_heads")
    keys = _first(module, "n_kv_heads", "num_key_value_heads")
    width: int = module.o_proj.weight.shape[1]
    if "scales" in module.o_proj:
        width = width * 32 // module.o_proj.bits
    norms = {}
    if "q_norm" in module:
        norms = {"query_norm": module.q_norm.weight, "key_norm": module.k_norm.weight}
        norms |= {"epsilon": module.q_norm.eps}
    return Heads(queries, keys, width // queries, rope_of(module.rope), gated, **norms)


def _first(module: Any, *names: str) -> int:
    count: int = next(getattr(module, name) for name in names if hasattr(module, name))
    return count


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
