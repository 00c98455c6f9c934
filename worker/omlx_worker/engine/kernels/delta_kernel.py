"""The gated delta rule as one GPU kernel: the state is read once and written once.

A few lanes of a warp hold one row of a head's state, ``Dk`` numbers, in registers. They replay
the accepted positions of the last window, run this one, and write the state where it is
committed: after the first position of a decoding window, after the last of a prompt's.

A window makes a new state: MLX allocates every output of a kernel, takes over no input's memory,
and orders kernels by the outputs that it knows. One step is dispatched ahead, so there are three
states at the peak, which admission counts.

CUDA and Metal have the same body; it has NOT been run on Metal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from omlx_worker.engine.kernels.delta_rule import Inputs, Kept
from omlx_worker.engine.kernels.source import Platform, launch, source

LANES = 8
"""Lanes that share a row of the state. A warp then holds four rows, which hides latency.

On one NVIDIA H200, 32 heads of 128 x 128, a prompt of 1,024 positions took 0.39, 0.37, 0.49 and
0.55 ms with 4, 8, 16 and 32 lanes; a window of 4 over 32 rows 0.11, 0.11, 0.11 and 0.15 ms.
"""

ROWS = 16
"""Rows of the state in a block, at most."""

MULTIPLES = (4 * LANES, 32 // LANES)
"""The kernel takes key and value heads whose sizes are multiples of these."""

_REPLAYS = """
  const int kept_width = kept_keys_shape[1];
  const int replays = accepted[slot];
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


@cache
def code(*, replays: bool) -> str:
    """The source for one lane, with or without positions to replay."""
    with_replays = _BODY.replace("REPLAYS", _REPLAYS if replays else "constexpr int replays = 0;")
    return with_replays.replace("PICK", _PICK if replays else _PICK_WINDOW)


def inputs(
    window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
) -> dict[str, mx.array]:
    """The kernel's inputs by name."""
    past = {}
    if kept is not None:
        past = {f"kept_{name}": part for name, part in kept._asdict().items()}
        past["accepted"] = accepted
    return {**window._asdict(), **past, "state": state}


@dataclass(frozen=True)
class DeltaKernel:
    """The `DeltaRule` that launches the kernel."""

    platform: Platform

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        given = inputs(window, kept, accepted, state)
        return self._launch(given, replays=kept is not None, commit_first=True)

    def read(
        self, prompt: Inputs, _log_decay: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        given = {**prompt._asdict(), "state": state}
        return self._launch(given, replays=False, commit_first=False)

    def _launch(
        self, given: dict[str, mx.array], *, replays: bool, commit_first: bool
    ) -> tuple[mx.array, mx.array]:
        keys, values, state = given["keys"], given["values"], given["state"]
        (key_heads, dk), (heads, dv) = keys.shape[2:], values.shape[2:]
        if dk % MULTIPLES[0] or dv % MULTIPLES[1]:
            raise ValueError(f"it does not take key heads of {dk} and value heads of {dv}")
        sizes = {"Dk": dk, "Dv": dv, "Hk": key_heads, "H": heads, "Lanes": LANES}
        out, committed = launch(
            self.platform,
            "delta_replay_and_run" if replays else "delta_run",
            source(self.platform, code(replays=replays)),
            given,
            {"outputs": (values.shape, keys.dtype), "committed": (state.shape, mx.float32)},
            {"T": keys.dtype, **sizes, "CommitFirst": commit_first},
            grid=(LANES, dv, state.shape[0] * heads),
            threadgroup=(LANES, math.gcd(dv, ROWS), 1),
        )
        return out, committed
