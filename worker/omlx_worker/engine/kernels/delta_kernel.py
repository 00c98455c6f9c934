"""The gated delta rule of a step as one GPU kernel: the state is read once and written once.

A few lanes of a warp hold one row of a head's state, ``Dk`` numbers, in registers. They replay
the accepted positions of the last window, run the present one, and write the state where it is
committed: after the first position of a decoding window, after the last of a prompt's.

On CUDA a decoding window writes the state over the one it was given. MLX has no word for that,
but a new state for every step, with one step dispatched ahead, means three of them at the peak,
and the states of short rows are most of what they hold. No two lanes touch the same numbers, and
a step depends on the one before it through its tokens, so that nothing reads a state that is
being written; whoever else wants it waits for the step first, as `Seats.drain` does.

The CUDA form is the default where MLX runs on CUDA. The Metal form has the same body; it has
NOT been run on hardware and is off unless ``OMLX_QUEUE_METAL_KERNEL=1``: mlx-lm's own Metal
kernel is the default there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import mlx.core as mx

from omlx_worker.engine.kernels import platform

if TYPE_CHECKING:
    from omlx_worker.engine.kernels.delta_rule import Inputs, Kept

LANES = 8
"""Lanes that share a row of the state, so that a warp holds four rows, which hides latency.

On one NVIDIA H200, 32 heads of 128 x 128, a prompt of 1,024 positions took 0.39, 0.37, 0.49 and
0.55 ms with 4, 8, 16 and 32 lanes; a window of 4 over 32 rows 0.11, 0.11, 0.11 and 0.15 ms.
"""

ROWS = 16
"""Rows of the state a block works on, at most."""

_WINDOW = ["queries", "keys", "values", "decay", "beta"]
_KEPT = ["kept_keys", "kept_values", "kept_decay", "kept_beta", "accepted"]

_REPLAYS = """
  const int kept_width = kept_keys_shape[1];
  const int replays = accepted[slot];
"""

_IN_PLACE = """
  float* const committed = const_cast<float*>(state);
"""

_PICK = """
    const bool past = t < 0;
    const int at = past ? slot * kept_width + 1 + replays + t : slot * width + t;
    READONLY T* k_at = (past ? kept_keys : keys) + (at * Hk + key_head) * Dk;
    const int v_index = (at * H + head) * Dv + row;
    const int gate = at * H + head;
    // Numbers are picked, not pointers: Metal keeps small arrays in another address space.
    const float v_at = static_cast<float>(past ? kept_values[v_index] : values[v_index]);
    const float decay_at = past ? kept_decay[gate] : decay[gate];
    const float beta_at = static_cast<float>(past ? kept_beta[gate] : beta[gate]);
"""

_PICK_WINDOW = """
    const bool past = false;
    const int at = slot * width + t;
    READONLY T* k_at = keys + (at * Hk + key_head) * Dk;
    const float v_at = static_cast<float>(values[(at * H + head) * Dv + row]);
    const float decay_at = decay[at * H + head];
    const float beta_at = static_cast<float>(beta[at * H + head]);
"""

_BODY = """
  constexpr int fours = Dk / (4 * Lanes);
  const int slot = n / H;
  const int head = n % H;
  const int key_head = head / (H / Hk);
  const int width = keys_shape[1];
  REPLAYS
  const int commit = CommitFirst ? 0 : width - 1;

  // state, committed: [S, H, Dv, Dk]. Lane l holds the fours l, l + Lanes, ... of its row.
  const long base = (static_cast<long>(n) * Dv + row) * Dk;
  float held[4 * fours];
  for (int j = 0; j < fours; ++j) {
    const Four<float> four = FOUR(float, state + base + 4 * (lane + Lanes * j));
    for (int i = 0; i < 4; ++i) held[4 * j + i] = four.at[i];
  }

  for (int t = -replays; t < width; ++t) {
    PICK
    float k[4 * fours];
    float recalled = 0.0f;
    for (int j = 0; j < fours; ++j) {
      const Four<T> four = FOUR(T, k_at + 4 * (lane + Lanes * j));
      for (int i = 0; i < 4; ++i) {
        const int e = 4 * j + i;
        k[e] = static_cast<float>(four.at[i]);
        held[e] *= decay_at;
        recalled += held[e] * k[e];
      }
    }
    for (int offset = Lanes / 2; offset > 0; offset /= 2) recalled += ACROSS(recalled, offset);
    const float change = beta_at * (v_at - recalled);

    float out = 0.0f;
    if (past) {
      for (int e = 0; e < 4 * fours; ++e) held[e] += k[e] * change;
    } else {
      READONLY T* q_at = queries + (at * Hk + key_head) * Dk;
      for (int j = 0; j < fours; ++j) {
        const Four<T> four = FOUR(T, q_at + 4 * (lane + Lanes * j));
        for (int i = 0; i < 4; ++i) {
          const int e = 4 * j + i;
          held[e] += k[e] * change;
          out += held[e] * static_cast<float>(four.at[i]);
        }
      }
      for (int offset = Lanes / 2; offset > 0; offset /= 2) out += ACROSS(out, offset);
      if (lane == 0) outputs[(at * H + head) * Dv + row] = static_cast<T>(out);
    }
    if (t == commit) {
      for (int j = 0; j < fours; ++j) {
        Four<float> four;
        for (int i = 0; i < 4; ++i) four.at[i] = held[4 * j + i];
        PUT_FOUR(float, committed + base + 4 * (lane + Lanes * j)) = four;
      }
    }
  }
"""


def runs(keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel takes these keys ``[S, W, Hk, Dk]`` and values, here."""
    fits = keys.shape[-1] % (4 * LANES) == 0 and values.shape[-1] % (32 // LANES) == 0
    return platform.backend() is not None and fits


def run(window: Inputs, state: mx.array) -> tuple[mx.array, mx.array]:
    """Run a window and commit all of it; see `omlx_worker.engine.kernels.delta_rule.read`."""
    return _launch(window, [], state, commit_first=False)


def replay_and_run(
    window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Replay, run a window and commit its first position; see `delta_rule.replay_and_run`.

    Returns:
        The window's outputs, and the state: on CUDA the array that was given, overwritten.
    """
    past = [] if kept is None else [*kept, accepted]
    return _launch(window, past, state, commit_first=True)


def body(*, replays: bool, in_place: bool = False) -> str:
    """What one lane does, with or without positions to replay."""
    code = (_IN_PLACE if in_place else "") + _BODY.replace(
        "REPLAYS", _REPLAYS if replays else "constexpr int replays = 0;"
    )
    return code.replace("PICK", _PICK if replays else _PICK_WINDOW)


def input_names(*, replays: bool) -> list[str]:
    return [*_WINDOW, *(_KEPT if replays else []), "state"]


def _launch(
    window: Inputs, past: list[mx.array], state: mx.array, *, commit_first: bool
) -> tuple[mx.array, mx.array]:
    backend = platform.backend()
    assert backend is not None
    key_heads, dk = window.keys.shape[2:]
    heads, dv = window.values.shape[2:]
    in_place = commit_first and backend == "cuda"
    name = "delta_replay_and_run" if past else "delta_run"
    run = platform.kernel(
        backend,
        f"{name}_in_place" if in_place else name,
        tuple(input_names(replays=bool(past))),
        ("outputs",) if in_place else ("outputs", "committed"),
        body(replays=bool(past), in_place=in_place),
    )
    outputs, *committed = run(
        inputs=[*window, *past, state],
        template=[
            ("T", window.keys.dtype),
            ("Dk", dk),
            ("Dv", dv),
            ("Hk", key_heads),
            ("H", heads),
            ("Lanes", LANES),
            ("CommitFirst", commit_first),
        ],
        grid=(LANES, dv, state.shape[0] * heads),
        threadgroup=(LANES, math.gcd(dv, ROWS), 1),
        output_shapes=[window.values.shape, state.shape][: 1 if in_place else 2],
        output_dtypes=[window.keys.dtype, mx.float32][: 1 if in_place else 2],
    )
    return outputs, committed[0] if committed else state
