"""Windows whose tokens are rotated by other positions than those of the cache."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from omlx_worker.engine.kernels.window import Window


def turned(window: Window, shift: int) -> Window:
    """The window with turns that are ``shift`` away from its cursors."""
    turns = window.cursors + shift
    places = mx.stack([window.body_lengths, window.cursors, turns], axis=1)
    return replace(window, turns=turns, places=places)
