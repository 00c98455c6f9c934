"""A gated delta net's convolution, norms and gates as one GPU kernel, and its output's as another.

MLX runs a dozen kernels for the first, of a few microseconds each, most of it overhead. Numbers are
rounded where MLX's operations round them. One source for CUDA and Metal; it has NOT been run on
Metal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels.delta_rule import Inputs
from omlx_worker.engine.kernels.plain.net_inputs import Projected
from omlx_worker.engine.kernels.source import IN_A_NAME, Platform, launch, source

_HISTORY = """
  const int past_width = past_shape[1];
  const int past_total = past_shape[2];
  const int settled = accepted[slot];
  #define BEFORE(p) (settled + Taps + (p) < Taps \\
      ? conv[(slot * Taps + settled + Taps + (p)) * Channels + channel] \\
      : past[(slot * past_width + 1 + settled + (p)) * past_total + channel])
"""

_NO_HISTORY = """
  #define BEFORE(p) conv[(slot * Taps + Taps + (p)) * Channels + channel]
"""

_BODY = """
  // One group of lanes has one head's vector at one position: queries, then keys, then values.
  constexpr int units = 2 * Hk + H;
  constexpr int longest = Dk > Dv ? Dk : Dv;
  const int width = projected_shape[1];
  const int slot = n / width;
  const int t = n % width;
  HISTORY
  if (row >= units) return;
  const int kind = row < Hk ? 0 : (row < 2 * Hk ? 1 : 2);
  const int head = row - kind * Hk;
  const int dim = kind == 2 ? Dv : Dk;
  const int begin = kind == 2 ? 2 * Hk * Dk + head * Dv : row * Dk;

  float x[longest / Lanes];
  float squares = 0.0f;
  for (int j = 0; j < longest / Lanes; ++j) {
    const int element = j * Lanes + lane;
    if (element >= dim) break;
    const int channel = begin + element;
    float sum = 0.0f;
    for (int tap = 0; tap <= Taps; ++tap) {
      const int p = t + tap - Taps;
      const float in = static_cast<float>(
          p < 0 ? BEFORE(p) : projected[(slot * width + p) * Projected + channel]);
      sum += in * static_cast<float>(filters[channel * (Taps + 1) + tap]);
    }
    const float convolved = static_cast<float>(static_cast<T>(sum));
    const float gate = static_cast<float>(static_cast<T>(1.0f / (1.0f + EXACT_EXP(-convolved))));
    x[j] = static_cast<float>(static_cast<T>(convolved * gate));
    squares += x[j] * x[j];
    // The state of the convolution stands after the position that is committed.
    const int commit = CommitFirst ? 0 : width - 1;
    if (t == commit) {
      for (int tap = 0; tap < Taps; ++tap) {
        const int p = t + 1 + tap - Taps;
        conv_out[(slot * Taps + tap) * Channels + channel] =
            p < 0 ? BEFORE(p) : projected[(slot * width + p) * Projected + channel];
      }
    }
  }
  const int at = slot * width + t;
  if (kind == 2) {
    for (int j = 0; j < longest / Lanes; ++j) {
      const int element = j * Lanes + lane;
      if (element < Dv) values[(at * H + head) * Dv + element] = static_cast<T>(x[j]);
    }
    if (lane == 0) {
      const long gates = static_cast<long>(at) * Projected;
      const float a = static_cast<float>(projected[gates + A + head]);
      const float b = static_cast<float>(projected[gates + B + head]);
      const float bias = static_cast<float>(dt_bias[head]);
      const float biased = static_cast<float>(static_cast<T>(a + bias));
      const float above = biased > 0.0f ? biased : 0.0f;
      const float soft = above + LOG1P(EXACT_EXP(-(above - biased + above)));
      const float rate = static_cast<float>(static_cast<T>(soft));
      decay[at * H + head] = EXACT_EXP(-EXACT_EXP(static_cast<float>(A_log[head])) * rate);
      beta[at * H + head] = static_cast<T>(1.0f / (1.0f + EXACT_EXP(-b)));
    }
    return;
  }
  for (int offset = Lanes / 2; offset > 0; offset /= 2) squares += ACROSS(squares, offset);
  const float inverse = RSQRT(squares / Dk + 1e-6f / Dk);
  const float root = RSQRT(static_cast<float>(Dk));
  const float scale = static_cast<float>(static_cast<T>(kind == 0 ? 1.0f / Dk : root));
  for (int j = 0; j < Dk / Lanes; ++j) {
    const float normed = static_cast<float>(static_cast<T>(x[j] * inverse));
    const int to = (at * Hk + head) * Dk + j * Lanes + lane;
    if (kind == 0) {
      queries[to] = static_cast<T>(normed * scale);
    } else {
      keys[to] = static_cast<T>(normed * scale);
    }
  }
"""

_GATED_NORM = """
  // One group of lanes has one head's output at one position.
  if (row >= H) return;
  float x[Dv / Lanes];
  float squares = 0.0f;
  for (int j = 0; j < Dv / Lanes; ++j) {
    x[j] = static_cast<float>(outputs[(static_cast<long>(n) * H + row) * Dv + j * Lanes + lane]);
    squares += x[j] * x[j];
  }
  for (int offset = Lanes / 2; offset > 0; offset /= 2) squares += ACROSS(squares, offset);
  const float inverse = RSQRT(squares / Dv + EPSILON);
  for (int j = 0; j < Dv / Lanes; ++j) {
    const int element = j * Lanes + lane;
    const float normed =
        static_cast<float>(static_cast<T>(x[j] * inverse * static_cast<float>(weight[element])));
    const float z = static_cast<float>(
        projected[static_cast<long>(n) * Projected + Gate + row * Dv + element]);
    const float gated = z / (1.0f + EXACT_EXP(-z)) * normed;
    mixed[(static_cast<long>(n) * H + row) * Dv + element] = static_cast<T>(gated);
  }
"""

LANES = 32
ROWS = 4


@cache
def code(*, replays: bool) -> str:
    """The source for one lane of `prepare`, with or without a window before this one."""
    return _BODY.replace("HISTORY", _HISTORY if replays else _NO_HISTORY)


@cache
def gated_code(epsilon: float) -> str:
    """The source for one lane of `gated`.

    It contains the epsilon: MLX keeps an array of one number in memory shared with the host. With
    eight rows on one NVIDIA H200 the kernel took 9.9 us reading it, 2.4 without.
    """
    return _GATED_NORM.replace("EPSILON", f"{epsilon!r}f")


@dataclass(frozen=True)
class NetKernels:
    """What `NetOperations` does between the projections and the rule, and after it, as kernels.

    Args:
        module: mlx-lm's `GatedDeltaNet`, whose projections are one product.
    """

    module: Any
    platform: Platform

    def prepare(
        self, projected: Projected, conv: mx.array, past: mx.array | None, accepted: mx.array | None
    ) -> tuple[Inputs, mx.array]:
        net, (given,) = self.module, projected
        (slots, width, total), dtype = given.shape, given.dtype
        heads, key_heads, dk, dv = net.num_v_heads, net.num_k_heads, net.head_k_dim, net.head_v_dim
        if dk % LANES or dv % LANES:
            raise ValueError(f"it does not take key heads of {dk} and value heads of {dv}")
        inputs = {"projected": given, "conv": conv, "filters": net.conv1d.weight}
        inputs |= {"A_log": net.A_log, "dt_bias": net.dt_bias}
        if past is not None and accepted is not None:
            inputs |= {"past": past, "accepted": accepted}
        types = {"T": dtype, "TA": net.A_log.dtype, "TB": net.dt_bias.dtype}
        sizes = {"Dk": dk, "Dv": dv, "Hk": key_heads, "H": heads}
        sizes |= {"Taps": conv.shape[1], "Channels": net.conv_dim}
        begins = {"Projected": total, "B": total - 2 * heads, "A": total - heads}
        *window, conv_out = launch(
            self.platform,
            "net_inputs" if past is None else "net_inputs_replaying",
            source(self.platform, code(replays=past is not None)),
            inputs,
            {
                "queries": ((slots, width, key_heads, dk), dtype),
                "keys": ((slots, width, key_heads, dk), dtype),
                "values": ((slots, width, heads, dv), dtype),
                "decay": ((slots, width, heads), mx.float32),
                "beta": ((slots, width, heads), dtype),
                "conv_out": (conv.shape, dtype),
            },
            {**types, **sizes, **begins, "Lanes": LANES, "CommitFirst": accepted is not None},
            grid=(LANES, _padded(2 * key_heads + heads), slots * width),
            threadgroup=(LANES, ROWS, 1),
        )
        return Inputs(*window), conv_out

    def gated(self, out: mx.array, projected: Projected) -> mx.array:
        net, (given,) = self.module, projected
        slots, width, heads, dv = out.shape
        sizes = {"H": heads, "Dv": dv, "Projected": given.shape[-1], "Gate": net.conv_dim}
        (mixed,) = launch(
            self.platform,
            "net_gated_norm_" + float(net.norm.eps).hex().translate(IN_A_NAME),
            source(self.platform, gated_code(net.norm.eps)),
            {"outputs": out, "projected": given, "weight": net.norm.weight},
            {"mixed": ((slots, width, heads * dv), out.dtype)},
            {"T": out.dtype, **sizes, "Lanes": LANES},
            grid=(LANES, _padded(heads), slots * width),
            threadgroup=(LANES, ROWS, 1),
        )
        return mixed


def _padded(vectors: int) -> int:
    """Vectors in whole blocks."""
    return -(-vectors // ROWS) * ROWS
