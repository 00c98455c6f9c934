"""The gated delta rule: its equation, its inputs, and the interface of its implementations.

At each position the state ``[Dv, Dk]`` of every head decays, forgets what it held under the key,
and holds the value instead; the query then reads it::

    state = decay * state
    state = state + beta * (value - state @ key) outer key
    out = state @ query

Source: Yang et al. 2025, "Gated Delta Networks".

Shapes: ``S`` slots, ``W`` positions, ``Hk`` key heads, ``H`` value heads, a multiple of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn


class Kept(NamedTuple):
    """A window kept for a replay; its first position is already committed.

    Keys ``[S, W, Hk, Dk]``, values ``[S, W, H, Dv]``, gates ``[S, W, H]``. ``decay`` is float32;
    the others have the model's type.
    """

    keys: mx.array
    values: mx.array
    decay: mx.array
    beta: mx.array


class Inputs(NamedTuple):
    """The inputs of a window: queries, shaped like keys, and the arrays of `Kept`."""

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


class DeltaRule(Protocol):
    """An implementation of the rule."""

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Replay the accepted positions of ``kept``, then run the window.

        Args:
            kept: the last window, padded or not; None if no draft of it can be accepted.
            accepted: ``[S]`` int32, positions after the first that are replayed.
            state: ``[S, H, Dv, Dk]`` float32.

        Returns:
            The window's outputs ``[S, W, H, Dv]``, and the state after its first position, which
            is committed whatever becomes of the drafts after it.
        """
        ...

    def read(
        self, prompt: Inputs, log_decay: mx.array, state: mx.array, /
    ) -> tuple[mx.array, mx.array]:
        """Run a stretch of a prompt and commit all of it.

        Args:
            log_decay: of ``prompt.decay``, which may itself be too small for float32.
        """
        ...


def log_decay(module: Any, a: mx.array) -> mx.array:
    """The logarithm of a net's decay, ``[S, W, H]`` float32, from its projection ``a``."""
    rate: mx.array = nn.softplus(a + module.dt_bias)
    return -mx.exp(module.A_log.astype(mx.float32)) * rate
