"""The gated delta rule over a window, by whichever implementation suits the device.

At each position a state ``[Dv, Dk]`` of every head decays, forgets what it held under the key,
and holds the value instead; the query then reads it::

    state = decay * state
    state = state + beta * (value - state @ key) outer key
    out = state @ query

Shapes: ``S`` slots, ``W`` positions, ``Hk`` key heads, ``H`` value heads, a multiple of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_kernel, gated_delta_ops

from omlx_worker.engine.kernels import chunked_delta, delta_kernel, window_delta


class Kept(NamedTuple):
    """A window as a replay takes it, its first position included, which is committed already.

    Keys ``[S, W, Hk, Dk]``, values ``[S, W, H, Dv]`` and gates ``[S, W, H]``, of which ``decay``
    is float32; the rest are of the model's type.
    """

    keys: mx.array
    values: mx.array
    decay: mx.array
    beta: mx.array


class Inputs(NamedTuple):
    """What a window takes: queries, shaped as keys are, besides what `Kept` says."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    decay: mx.array
    beta: mx.array

    def at(self, positions: slice) -> Inputs:
        return Inputs(*(part[:, positions] for part in self))

    @property
    def kept(self) -> Kept:
        return Kept(*self[1:])


def gates(module: Any, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
    """Decay, float32, and beta of a gated delta net, from the projections ``[S, W, H]`` of them."""
    return mx.exp(log_decay(module, a)), mx.sigmoid(b)


def log_decay(module: Any, a: mx.array) -> mx.array:
    """The logarithm of the decay, ``[S, W, H]`` float32."""
    rate: mx.array = nn.softplus(a + module.dt_bias)
    return -mx.exp(module.A_log.astype(mx.float32)) * rate


def replay_and_run(
    window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Commit what the last window's verdict and this window's first token settle; run the rest.

    The accepted prefix of ``kept`` is replayed, then the window runs. The state returned is the
    one after the window's first position, which stands whatever becomes of the drafts after it.

    Args:
        kept: the last window, padded or not; None where no draft of it can be accepted.
        accepted: ``[S]`` int32, how many of its positions after the first are replayed.
        state: ``[S, H, Dv, Dk]`` float32.

    Returns:
        The window's outputs ``[S, W, H, Dv]`` and the committed state, which may be ``state``
        itself, overwritten (`delta_kernel`).
    """
    if delta_kernel.runs(window.keys, window.values):
        return delta_kernel.replay_and_run(window, kept, accepted, state)
    if mx.default_device() == mx.cpu:
        return window_delta.replay_and_run(window, kept, accepted, state)
    return replay_and_run_by_mlx_lm(window, kept, accepted, state)


def replay_and_run_by_mlx_lm(
    window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`replay_and_run` in two runs of mlx-lm's own rule, which is how Metal does it by default."""
    lead, mask = window.at(slice(1)), None
    if kept is not None:
        depth = kept.keys.shape[1] - 1
        drafts = [part[:, 1:] for part in kept]
        # What a replay outputs is not needed, so keys stand in for its queries.
        pairs = zip(Inputs(drafts[0], *drafts), lead, strict=True)
        lead = Inputs(*(mx.concatenate(list(pair), axis=1) for pair in pairs))
        mask = mx.arange(depth + 1) < accepted[:, None]
        mask = mask | (mx.arange(depth + 1) == depth)
    out, state = _by_mlx_lm(lead, state, mask)
    out = out[:, -1:]
    if window.keys.shape[1] > 1:
        rest, _ = _by_mlx_lm(window.at(slice(1, None)), state, None)
        out = mx.concatenate([out, rest], axis=1)
    return out, state


def read(prompt: Inputs, log_decay: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """Run a stretch of a prompt and commit all of it.

    Args:
        log_decay: the logarithm of ``prompt.decay``, which may itself be too small for float32.
    """
    if delta_kernel.runs(prompt.keys, prompt.values):
        return delta_kernel.run(prompt, state)
    if mx.default_device() == mx.cpu and prompt.keys.shape[1] > chunked_delta.WORTHWHILE:
        return chunked_delta.run(prompt, log_decay, state)
    return _by_mlx_lm(prompt, state, None)


def _by_mlx_lm(inputs: Inputs, state: mx.array, mask: mx.array | None) -> tuple[mx.array, mx.array]:
    """mlx-lm's Metal kernel, for the keys that it takes, or its loop of operations."""
    update = gated_delta_ops
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        dim = inputs.keys.shape[-1]
        update = gated_delta_kernel if dim >= 32 and dim % 32 == 0 else gated_delta_ops
    out: tuple[mx.array, mx.array] = update(*inputs, state, mask)
    return out
