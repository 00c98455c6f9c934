"""From a gated delta net's projections to what its rule takes, as one CUDA kernel.

Convolution, activation, norms of queries and keys, and the gates: a dozen kernels of MLX's, each
of a few microseconds of which its work is a fraction. Numbers are rounded where theirs are.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from omlx_worker.engine.kernels import platform
from omlx_worker.engine.kernels.delta_rule import Inputs

_INPUTS = ("projected", "conv", "kernel", "A_log", "dt_bias")
_PAST = ("past", "accepted")
OUTPUTS = ("queries", "keys", "values", "decay", "beta", "conv_out")

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
      sum += in * static_cast<float>(kernel[channel * (Taps + 1) + tap]);
    }
    const float convolved = static_cast<float>(static_cast<T>(sum));
    const float gate = static_cast<float>(static_cast<T>(1.0f / (1.0f + expf(-convolved))));
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
      const float soft = fmaxf(biased, 0.0f) + log1pf(expf(-fabsf(biased)));
      const float rate = static_cast<float>(static_cast<T>(soft));
      decay[at * H + head] = expf(-expf(static_cast<float>(A_log[head])) * rate);
      beta[at * H + head] = static_cast<T>(1.0f / (1.0f + expf(-b)));
    }
    return;
  }
  for (int offset = Lanes / 2; offset > 0; offset /= 2) squares += ACROSS(squares, offset);
  const float inverse = rsqrtf(squares / Dk + 1e-6f / Dk);
  const float root = rsqrtf(static_cast<float>(Dk));
  const float scale = static_cast<float>(static_cast<T>(kind == 0 ? 1.0f / Dk : root));
  for (int j = 0; j < Dk / Lanes; ++j) {
    const float normed = static_cast<float>(static_cast<T>(x[j] * inverse));
    const int to = (at * Hk + head) * Dk + j * Lanes + lane;
    (kind == 0 ? queries : keys)[to] = static_cast<T>(normed * scale);
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
  const float inverse = rsqrtf(squares / Dv + EPSILON);
  for (int j = 0; j < Dv / Lanes; ++j) {
    const int element = j * Lanes + lane;
    const float normed =
        static_cast<float>(static_cast<T>(x[j] * inverse * static_cast<float>(weight[element])));
    const float z = static_cast<float>(
        projected[static_cast<long>(n) * Projected + Gate + row * Dv + element]);
    const float gated = z / (1.0f + expf(-z)) * normed;
    mixed[(static_cast<long>(n) * H + row) * Dv + element] = static_cast<T>(gated);
  }
"""

LANES = 32
ROWS = 4

_IN_A_NAME = str.maketrans({".": "_", "+": "p", "-": "m"})


def runs(module: Any, dtype: mx.Dtype) -> bool:
    """Whether these kernels take a gated delta net, here."""
    fits = module.head_k_dim % LANES == 0 and module.head_v_dim % LANES == 0
    return platform.backend() == "cuda" and fits and dtype in (mx.bfloat16, mx.float16, mx.float32)


def body(*, replays: bool) -> str:
    """What one lane of `prepare`'s kernel does, with or without a window before this one."""
    return _BODY.replace("HISTORY", _HISTORY if replays else _NO_HISTORY)


def gated_norm_body(epsilon: float) -> str:
    """What one lane of `gated_norm`'s kernel does.

    The epsilon is part of the source: an array of one number lies in memory that MLX shares with
    the host. With eight rows on one NVIDIA H200 the kernel took 9.9 us reading it, 2.4 without.
    """
    return _GATED_NORM.replace("EPSILON", f"{epsilon!r}f")


def prepare(
    module: Any,
    projected: mx.array,
    conv: mx.array,
    past: mx.array | None,
    accepted: mx.array,
    *,
    commit_first: bool,
) -> tuple[Inputs, mx.array]:
    """Convolve, normalise and gate.

    Args:
        projected: ``[S, W, qkv + z + b + a]``, all projections side by side.
        conv: ``[S, taps, channels]``, the convolution's inputs that were committed.
        past: the last window's projections, the convolution's inputs first, of which the
            accepted drafts' count; None where none of it can be accepted.
        commit_first: whether the window's first position is committed, or all of it.

    Returns:
        What the rule takes, and ``conv`` up to what is committed.
    """
    slots, width, total = projected.shape
    taps, channels = module.conv_kernel_size - 1, module.conv_dim
    key_heads, heads, dk, dv = _heads(module)
    run = platform.kernel(
        "cuda",
        "net_inputs" if past is None else "net_inputs_replaying",
        _INPUTS if past is None else _INPUTS + _PAST,
        OUTPUTS,
        body(replays=past is not None),
    )
    dtype = projected.dtype
    units = -(-(2 * key_heads + heads) // ROWS) * ROWS
    given = [projected, conv, module.conv1d.weight, module.A_log, module.dt_bias]
    queries, keys, values, decay, beta, conv_out = run(
        inputs=given if past is None else [*given, past, accepted],
        template=[
            ("T", dtype),
            ("TA", module.A_log.dtype),
            ("TB", module.dt_bias.dtype),
            ("Dk", dk),
            ("Dv", dv),
            ("Hk", key_heads),
            ("H", heads),
            ("Taps", taps),
            ("Channels", channels),
            ("Projected", total),
            ("B", total - 2 * heads),
            ("A", total - heads),
            ("Lanes", LANES),
            ("CommitFirst", commit_first),
        ],
        grid=(LANES, units, slots * width),
        threadgroup=(LANES, ROWS, 1),
        output_shapes=[
            (slots, width, key_heads, dk),
            (slots, width, key_heads, dk),
            (slots, width, heads, dv),
            (slots, width, heads),
            (slots, width, heads),
            (slots, taps, channels),
        ],
        output_dtypes=[dtype, dtype, dtype, mx.float32, dtype, dtype],
    )
    return Inputs(queries, keys, values, decay, beta), conv_out


def gated_norm(module: Any, outputs: mx.array, projected: mx.array) -> mx.array:
    """Norm ``outputs`` ``[S, W, H, Dv]`` and gate them: ``[S, W, H * Dv]``."""
    slots, width, heads, dv = outputs.shape
    epsilon = module.norm.eps
    run = platform.kernel(
        "cuda",
        # MLX keeps compiled kernels by name.
        "net_gated_norm_" + float(epsilon).hex().translate(_IN_A_NAME),
        ("outputs", "projected", "weight"),
        ("mixed",),
        gated_norm_body(epsilon),
    )
    units = -(-heads // ROWS) * ROWS
    (mixed,) = run(
        inputs=[outputs, projected, module.norm.weight],
        template=[
            ("T", outputs.dtype),
            ("H", heads),
            ("Dv", dv),
            ("Projected", projected.shape[-1]),
            ("Gate", module.conv_dim),
            ("Lanes", LANES),
        ],
        grid=(LANES, units, slots * width),
        threadgroup=(LANES, ROWS, 1),
        output_shapes=[(slots, width, heads * dv)],
        output_dtypes=[outputs.dtype],
    )
    result: mx.array = mixed
    return result


def _heads(module: Any) -> tuple[int, int, int, int]:
    return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
