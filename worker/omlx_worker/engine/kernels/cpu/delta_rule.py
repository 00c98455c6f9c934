"""The gated delta rule on the CPU: products of matrices instead of a loop over positions.

Within a chunk the changes ``u`` that its positions make to the state solve a triangular system.
With ``G`` the decay from the chunk's start to a position and ``G_tj`` the one between two::

    u_t = beta_t (v_t - G_t state k_t - sum over j < t of G_tj (k_t . k_j) u_j)

and everything else follows from them by products. Source: Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule", with gates as in "Gated Delta Networks", 2025.
"""

from __future__ import annotations

import mlx.core as mx

from omlx_worker.engine.kernels.delta_rule import Inputs, Kept

CHUNK = 16
"""Positions of a chunk: on two CPU cores 16 took half of what 64 did, and a seventh of the loop."""


class ProductRule:
    """The `DeltaRule` of this module."""

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Run the positions to replay and the window's own as one chunk.

        The state is read once, for all positions, and written once, where it is committed. A
        position that is not replayed neither decays nor changes it.

        Per step of the demo model on two CPU cores, eight rows of 6 layers: 2.2 ms for a window of
        one, and 3.7, 4.3 and 7.3 ms for two, three and four with replays; mlx-lm's loop takes 3.7,
        13.6, 21.7 and 37.0 ms.
        """
        heads = window.values.shape[2]
        replays = 0 if kept is None else kept.keys.shape[1] - 1

        queries = _by_head(window.queries, heads)
        parts = list(window.kept)
        if kept is not None:
            pairs = zip(kept, parts, strict=True)
            parts = [mx.concatenate([past[:, 1:], part], axis=1) for past, part in pairs]
        keys, values, decay, beta = (_by_head(part, heads) for part in parts)
        positions = keys.shape[2]
        if replays:
            place = mx.arange(positions)
            runs = ((place < accepted[:, None]) | (place >= replays))[:, None]
            decay, beta = mx.where(runs, decay, 1), mx.where(runs, beta, 0)
        beta = beta[..., None]
        since_start = (mx.cumprod(decay, axis=-1) if positions > 1 else decay)[..., None]

        # What keys and, below them, queries find in the state, and of each other.
        readers = mx.concatenate([keys, queries], axis=2)
        found = readers @ state.swapaxes(-1, -2)
        overlap = readers @ keys.swapaxes(-1, -2)
        changes = beta * (values - since_start * found[:, :, :positions])
        reading = overlap[:, :, positions:]
        commits = changes[:, :, : replays + 1]
        if positions > 1:
            later = mx.tri(positions, k=-1, dtype=mx.bool_)
            between = mx.tril(mx.cumprod(mx.where(later, decay[..., None], 1), axis=-2))
            system = mx.where(later, beta * between * overlap[:, :, :positions], mx.eye(positions))
            changes = mx.linalg.tri_inv(system, stream=mx.cpu) @ changes
            reading = between[:, :, replays:] * reading
            commits = between[:, :, replays, : replays + 1, None] * changes[:, :, : replays + 1]
        outs = since_start[:, :, replays:] * found[:, :, positions:] + reading @ changes
        held = since_start[:, :, replays : replays + 1] * state
        committed = mx.addmm(held, commits.swapaxes(-1, -2), keys[:, :, : replays + 1])
        return outs.swapaxes(1, 2).astype(window.queries.dtype), committed

    def read(
        self, prompt: Inputs, log_decay: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Run a chunk of `CHUNK` positions at a time."""
        width, heads = prompt.values.shape[1:3]
        size = min(CHUNK, width)

        def chunks(part: mx.array) -> mx.array:
            """``[S, W, Hk or H, ...]`` to ``[S, H, chunks, size, ...]``, zeros at the end."""
            padding = [(0, 0), (0, -width % size)] + [(0, 0)] * (part.ndim - 2)
            laid = _by_head(mx.pad(part, padding), heads)
            return laid.reshape(*laid.shape[:2], -1, size, *part.shape[3:])

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


def _by_head(part: mx.array, heads: int) -> mx.array:
    """``[S, W, Hk or H, ...]`` to float32 ``[S, H, W, ...]``."""
    if part.shape[2] != heads:
        part = mx.repeat(part, heads // part.shape[2], axis=2)
    return part.swapaxes(1, 2).astype(mx.float32)
