"""Products of a few rows with a bfloat16 matrix, on CUDA, at the speed of reading the matrix.

A step multiplies as many rows as its windows have tokens. With fewer than 16 rows, the common case,
cuBLAS leaves much of the memory's bandwidth unused. Here each block owns 16 rows of the matrix, its
warps divide their length, and tensor cores take 16 x 8 pieces straight from registers. The order
along the length is permuted, for both factors alike, so that each lane loads 16 bytes at a time.
Sums are float32, rounded once, like cuBLAS's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.kernels.source import launch

MOST_ROWS = 32
"""Rows whose sums fit a block's shared memory."""

WARPS = 8

_HEADER = """
__device__ __forceinline__ void multiply_add(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""

_BODY = """
  constexpr int pieces = Gated || Eights > 1 ? 2 : 1;
  constexpr int block_rows = Gated ? 16 : 16 * pieces;
  const int rows = x_shape[0];
  const int length = x_shape[1];
  const int features = weight_shape[0] / (Gated ? 2 : 1);
  const long apart = Gated ? features : 16;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int quad = lane % 4;
  const int first = blockIdx.x * block_rows;

  float sums[pieces][Eights][4] = {};
  const bf16* w_at = weight + static_cast<long>(first + group) * length + 8 * quad;
  const bf16* x_at = x + static_cast<long>(group) * length + 8 * quad;
  #pragma unroll 4
  for (int k = 32 * warp; k < length; k += 32 * Warps) {
    uint4 w[pieces][2];
    uint4 in[Eights];
    #pragma unroll
    for (int p = 0; p < pieces; ++p) {
      w[p][0] = __ldcs(reinterpret_cast<const uint4*>(w_at + p * apart * length + k));
      w[p][1] = __ldcs(reinterpret_cast<const uint4*>(w_at + (p * apart + 8) * length + k));
    }
    #pragma unroll
    for (int e = 0; e < Eights; ++e) {
      in[e] = group + 8 * e < rows
          ? __ldg(reinterpret_cast<const uint4*>(x_at + 8l * e * length + k))
          : make_uint4(0, 0, 0, 0);
    }
    #pragma unroll
    for (int p = 0; p < pieces; ++p) {
      #pragma unroll
      for (int e = 0; e < Eights; ++e) {
        multiply_add(sums[p][e], w[p][0].x, w[p][1].x, w[p][0].y, w[p][1].y, in[e].x, in[e].y);
        multiply_add(sums[p][e], w[p][0].z, w[p][1].z, w[p][0].w, w[p][1].w, in[e].z, in[e].w);
      }
    }
  }

  __shared__ float parts[Warps][16 * pieces][8 * Eights + 1];
  #pragma unroll
  for (int p = 0; p < pieces; ++p) {
    #pragma unroll
    for (int e = 0; e < Eights; ++e) {
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[warp][16 * p + group + 8 * (i / 2)][8 * e + 2 * quad + i % 2] = sums[p][e][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < block_rows * rows; i += 32 * Warps) {
    const int feature = i % block_rows;
    const int row = i / block_rows;
    float sum = 0.0f;
    for (int w = 0; w < Warps; ++w) sum += parts[w][feature][row];
    float out = static_cast<float>(static_cast<bf16>(sum));
    if (Gated) {
      float up = 0.0f;
      for (int w = 0; w < Warps; ++w) up += parts[w][16 + feature][row];
      const float open = static_cast<float>(static_cast<bf16>(1.0f / (1.0f + expf(-out))));
      const float gate = static_cast<float>(static_cast<bf16>(out * open));
      out = gate * static_cast<float>(static_cast<bf16>(up));
    }
    const long at = static_cast<long>(row) * features + first + feature;
    if (first + feature < features) y[at] = static_cast<bf16>(out + ADDED);
  }
"""


@cache
def body(*, adds: bool) -> str:
    """The source, with or without an array to add."""
    added = "static_cast<float>(added[at])" if adds else "0.0f"
    return "  using bf16 = __nv_bfloat16;\n" + _BODY.replace("ADDED", added)


def takes(layer: Any) -> bool:
    """Whether the kernel takes a layer's weight."""
    return (
        type(layer) in (nn.Linear, nn.Embedding)
        and "bias" not in layer
        and layer.weight.dtype == mx.bfloat16
        and all(size % 32 == 0 for size in layer.weight.shape)
    )


def multiply(
    weight: mx.array, x: mx.array, added: mx.array | None = None, *, gated: bool = False
) -> mx.array:
    """``x @ weight.T``, plus ``added`` if given.

    Args:
        weight: ``[features, length]`` bfloat16.
        x: ``[..., length]`` bfloat16, at most `MOST_ROWS` rows.
        added: shaped as the result.
        gated: the weight's first half gates its second: the result is ``silu(first) * second``.
    """
    flat = x.reshape(-1, x.shape[-1])
    features = weight.shape[0] // (2 if gated else 1)
    eights = -(-flat.shape[0] // 8)
    pieces = 2 if gated or eights > 1 else 1
    block_rows = 16 if gated else 16 * pieces
    inputs = {"x": flat, "weight": weight} | ({} if added is None else {"added": added})
    (out,) = launch(
        "cuda",
        "skinny_product" if added is None else "skinny_product_added",
        body(adds=added is not None),
        inputs,
        {"y": ((*x.shape[:-1], features), mx.bfloat16)},
        {"Eights": eights, "Warps": WARPS, "Gated": gated},
        grid=(32 * WARPS * -(-features // block_rows), 1, 1),
        threadgroup=(32 * WARPS, 1, 1),
        header=_HEADER,
    )
    return out
