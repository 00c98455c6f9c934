"""Products of a few rows with a packed matrix, on Metal, that read the matrix once.

MLX reads it again for every row or every five, and above that multiplies 32 rows whatever there
are. Here a simdgroup multiplies 8 x 8 matrices: the packed matrix is their left factor and the rows
their right one, so nothing is padded but the rows, to eights. A lane unpacks its numbers straight
to registers. The order along the length is permuted, for both factors alike, so that a lane loads
four words at once: step ``s`` of a slice takes field ``s`` of every second word.

The simdgroups of a block divide the length; their sums, float32, are joined in one order. So what
becomes of a row depends neither on how many others there are nor on its place among them.

It has NOT been run on Metal.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from omlx_worker.engine.kernels.plain.products import Packed
from omlx_worker.engine.kernels.source import launch, source

MOST_EIGHTS = 3
"""Of 8 rows, for which the matrix is read once."""

ROWS = range(1, 8 * MOST_EIGHTS + 1)
"""Rows that it takes, where a contest decides."""

FIXED_ROWS = range(5, 17)
"""Rows for which such a kernel wins on M4 by others' figures, where no contest decides."""

GENERATIONS = range(13, 17)
"""Of GPUs, M1's to M4's: on M5 another kernel of this kind stalled, in long use only."""

PARTS = 8
"""Simdgroups of a block. M1 and M2 refuse blocks of more than some 400 threads to such kernels."""

WORDS = 16
"""Words of a packed row that a simdgroup takes at once; a lane takes four."""

_BODY = """
  constexpr int fields = 32 / Bits;
  constexpr int slice = WORDS * fields;
  constexpr uint mask = (1u << Bits) - 1;
  constexpr int sides = Gated ? 2 : 1;
  constexpr int side = Tiles / sides;
  constexpr int block_features = 8 * side;
  const int rows = x_shape[0];
  const int length = x_shape[1];
  const int features = weight_shape[0] / sides;
  const int own = thread_index_in_simdgroup;
  const int part = simdgroup_index_in_threadgroup;
  const int first = block_features * threadgroup_position_in_grid.x;
  const int top = 8 * Eights * threadgroup_position_in_grid.y;
  // Where a lane's two elements of an 8 x 8 matrix are: Metal does not say, MLX's kernels do.
  const int line = own / 16 * 4 + own / 2 % 4;
  const int pair = own / 8 % 2 * 4 + own % 2 * 2;

  simdgroup_matrix<float, 8, 8> sums[Tiles][Eights];
  #pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    #pragma unroll
    for (int e = 0; e < Eights; ++e) {
      sums[t][e] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
  }

  for (int k = slice * part; k < length; k += slice * Parts) {
    Four<uint> words[Tiles];
    float scale[Tiles];
    float bias[Tiles];
    const int begin = k + 2 * pair * fields;
    #pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      const int near = min(first + 8 * (t % side) + line, features - 1);
      const long feature = near + t / side * features;
      words[t] = FOUR(uint, weight + (feature * length + begin) / fields);
      scale[t] = static_cast<float>(scales[(feature * length + begin) / Group]);
      bias[t] = static_cast<float>(biases[(feature * length + begin) / Group]);
    }
    #pragma unroll
    for (int half_of = 0; half_of < 2; ++half_of) {
      const int from = k + (2 * line + half_of) * fields;
      float in[Eights][2][fields];
      #pragma unroll
      for (int e = 0; e < Eights; ++e) {
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = top + 8 * e + pair + j;
          #pragma unroll
          for (int f = 0; f < fields; f += 4) {
            Four<T> four = {};
            if (row < rows) four = FOUR(T, x + static_cast<long>(row) * length + from + f);
            for (int i = 0; i < 4; ++i) in[e][j][f + i] = static_cast<float>(four.at[i]);
          }
        }
      }
      #pragma unroll
      for (int f = 0; f < fields; ++f) {
        simdgroup_matrix<float, 8, 8> right[Eights];
        #pragma unroll
        for (int e = 0; e < Eights; ++e) {
          for (int j = 0; j < 2; ++j) right[e].thread_elements()[j] = in[e][j][f];
        }
        #pragma unroll
        for (int t = 0; t < Tiles; ++t) {
          simdgroup_matrix<float, 8, 8> left;
          for (int j = 0; j < 2; ++j) {
            const uint packed = words[t].at[2 * j + half_of] >> (Bits * f) & mask;
            left.thread_elements()[j] = fma(static_cast<float>(packed), scale[t], bias[t]);
          }
          #pragma unroll
          for (int e = 0; e < Eights; ++e) {
            simdgroup_multiply_accumulate(sums[t][e], left, right[e], sums[t][e]);
          }
        }
      }
    }
  }

  SHARED float joined[Parts][8 * Tiles][8 * Eights + 1];
  #pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    #pragma unroll
    for (int e = 0; e < Eights; ++e) {
      for (int j = 0; j < 2; ++j) {
        joined[part][8 * t + line][8 * e + pair + j] = sums[t][e].thread_elements()[j];
      }
    }
  }
  BARRIER;
  const int there = min(8 * Eights, rows - top);
  for (int i = thread_index_in_threadgroup; i < block_features * there; i += 32 * Parts) {
    const int feature = i % block_features;
    const int row = i / block_features;
    float sum = 0.0f;
    for (int p = 0; p < Parts; ++p) sum += joined[p][feature][row];
    float out = static_cast<float>(static_cast<T>(sum));
    if (Gated) {
      float up = 0.0f;
      for (int p = 0; p < Parts; ++p) up += joined[p][8 * Tiles / 2 + feature][row];
      const float open = static_cast<float>(static_cast<T>(1.0f / (1.0f + EXACT_EXP(-out))));
      const float gate = static_cast<float>(static_cast<T>(out * open));
      out = gate * static_cast<float>(static_cast<T>(up));
    }
    if (first + feature < features) {
      const long at = static_cast<long>(top + row) * features + first + feature;
      y[at] = static_cast<T>(out + ADDED);
    }
  }
""".replace("WORDS", str(WORDS))


def is_for(architecture: str) -> bool:
    """Whether the kernel may run on a GPU, ``applegpu_g16s`` for one; on an unknown one never."""
    told = re.fullmatch(r"applegpu_g(\d+)[a-z]", architecture)
    return told is not None and int(told[1]) in GENERATIONS


def takes(layer: Any) -> bool:
    """Whether the kernel takes a layer: affine, in 4 or 8 bits, of a length in whole slices.

    A slice is 128 numbers of 4 bits or 64 of 8.
    """
    return (
        type(layer) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        and layer.mode == "affine"
        and layer.bits in (4, 8)
        and layer.group_size in (32, 64, 128)
        and layer.weight.shape[1] % WORDS == 0
    )


@cache
def code(*, adds: bool) -> str:
    """The source, with or without an array to add."""
    added = "static_cast<float>(added[at])" if adds else "0.0f"
    return source("metal", _BODY.replace("ADDED", added))


def tiles(features: int) -> int:
    """Of 8 features in a block: more read the rows less often, fewer make more blocks."""
    return 4 if features >= 4096 else 2


def eights(rows: int) -> int:
    """Tiles of 8 rows in a block. A kernel is compiled for each number of them."""
    return min(-(-rows // 8), MOST_EIGHTS)


def multiply(
    x: mx.array,
    weights: Packed,
    added: mx.array | None = None,
    *,
    bits: int,
    group_size: int,
    gated: bool = False,
) -> mx.array:
    """See `omlx_worker.engine.kernels.plain.products.packed_product`.

    Args:
        x: of the type of the scales; above 24 rows the matrix is read once for each 24.
    """
    flat = x.reshape(-1, x.shape[-1])
    rows, whole = flat.shape[0], weights[0].shape[0]
    features, per_block = whole // (2 if gated else 1), tiles(whole)
    inputs = dict(zip(("weight", "scales", "biases"), weights, strict=True))
    sizes = {"Bits": bits, "Group": group_size, "Tiles": per_block, "Eights": eights(rows)}
    (out,) = launch(
        "metal",
        "few_row_product" if added is None else "few_row_product_added",
        code(adds=added is not None),
        {"x": flat, **inputs} | ({} if added is None else {"added": added}),
        {"y": ((*x.shape[:-1], features), x.dtype)},
        {"T": x.dtype, **sizes, "Parts": PARTS, "Gated": gated},
        grid=(32 * PARTS * -(-whole // (8 * per_block)), -(-rows // (8 * eights(rows))), 1),
        threadgroup=(32 * PARTS, 1, 1),
    )
    return out
