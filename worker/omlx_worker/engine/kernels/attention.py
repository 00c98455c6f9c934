"""Attention of a window to the body and tail of every row: what each implementation offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from omlx_worker.engine.kernels.window import Window

Pair = tuple[mx.array, mx.array]
"""Keys ``[S, H, L, D]`` and values ``[S, H, L, Dv]``."""


class Attention(Protocol):
    """Writes tails, and attends to bodies and tails."""

    @property
    def sums_masked(self) -> bool:
        """Whether masked positions are summed too, with weight 0; then all must be finite."""
        ...

    def put(self, tails: Pair, keys: mx.array, values: mx.array, window: Window) -> Pair:
        """The tails with the window's keys ``[S, H, W, D]``, rotated, and values in them."""
        ...

    def attend(
        self,
        queries: mx.array,
        bodies: Sequence[Pair],
        tails: Pair,
        window: Window,
        scale: float,
        *,
        ring: int = 0,
        sliding: int = 0,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
        rotary: mx.array | None = None,
    ) -> mx.array:
        """Attend to the bodies and to the tails, which hold the window's own keys and values.

        Args:
            queries: ``[S, Hq, W, D]``, rotated; ``Hq`` is a multiple of the key heads.
            bodies: of neighbouring slots, of `Window.spans` each.
            ring: positions of a body, at most; 0 for a layer without a sliding window.
            sliding: how many of the latest positions a query sees, its own included; 0 for all.
            sinks: ``[Hq]``, scores of a position without a value; None for none.
            softcap: the limit of scores, by a hyperbolic tangent; 0 for none.
            rotary: ``[S, Hq, W, Dv]``, for latent attention: the keys are latents, which are also
                what is mixed, and the values are the keys of these queries.

        Returns:
            ``[S, Hq, W, Dv]`` (``D`` for latents).
        """
        ...
