"""The gated delta rule over a prompt in chunks: products of matrices instead of a loop.

Within a chunk the changes ``u`` that its positions make to the state solve a triangular system.
With ``G`` the decay from the chunk's start to a position and ``G_tj`` the one between two::

    u_t = beta_t (v_t - G_t state k_t - sum over j < t of G_tj (k_t . k_j) u_j)

and everything else follows from them by products (Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule", with gates as in "Gated Delta Networks", 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from omlx_worker.engine.kernels.delta_rule import Inputs

CHUNK = 16
"""Positions of a chunk: on two CPU cores 16 took half of what 64 did, and a seventh of the loop."""

WORTHWHILE = 8
"""Prompts of at most so many positions are as fast a position at a time."""


def run(prompt: Inputs, log_decay: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Run a stretch of a prompt from ``state``, on the CPU; see `delta_rule.read`.

    Returns:
        Outputs ``[S, W, H, Dv]`` in the queries' type, and the state after the last position.
    """
    width, heads = prompt.values.shape[1:3]
    size = min(CHUNK, width)

    def chunks(part: mx.array) -> mx.array:
        """``[S, W, heads, ...]`` to float32 ``[S, H, chunks, size, ...]``, zeros at the end."""
        padded = mx.pad(part, [(0, 0), (0, -width % size)] + [(0, 0)] * (part.ndim - 2))
        repeated = mx.repeat(padded, heads // part.shape[2], axis=2).swapaxes(1, 2)
        return repeated.reshape(part.shape[0], heads, -1, size, *part.shape[3:]).astype(mx.float32)

    # Padding neither decays nor changes the state: its log-decay and its beta are 0.
    q, k, v = chunks(prompt.queries), chunks(prompt.keys), chunks(prompt.values)
    beta = chunks(prompt.beta)[..., None]
    decayed = mx.cumsum(chunks(log_decay), axis=-1)
    between = decayed[..., :, None] - decayed[..., None, :]
    lower = mx.tri(size, dtype=mx.bool_)
    between = mx.exp(mx.where(lower, between, -mx.inf))
    since_start = mx.exp(decayed)[..., None]
    until_end = mx.exp(decayed[..., -1:] - decayed)[..., None]

    overlap = mx.tril(beta * between * (k @ k.swapaxes(-1, -2)), -1)
    solve = mx.linalg.tri_inv(overlap + mx.eye(size), stream=mx.cpu)
    wanted = solve @ (beta * v)
    recalling = solve @ (beta * since_start * k)
    within = between * (q @ k.swapaxes(-1, -2))
    reading = q * since_start
    writing = (k * until_end).swapaxes(-1, -2)
    kept = since_start[..., -1:, :]

    outs = []
    held = state.swapaxes(-1, -2)
    for chunk in range(q.shape[2]):
        changes = wanted[:, :, chunk] - recalling[:, :, chunk] @ held
        outs.append(reading[:, :, chunk] @ held + within[:, :, chunk] @ changes)
        held = kept[:, :, chunk] * held + writing[:, :, chunk] @ changes
    out = mx.concatenate(outs, axis=2)[:, :, :width].swapaxes(1, 2)
    return out.astype(prompt.queries.dtype), held.swapaxes(-1, -2)
