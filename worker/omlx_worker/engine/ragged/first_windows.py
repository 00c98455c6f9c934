"""The first windows of prompts, compiled for a few shapes that others are padded to.

What a window costs however few its tokens is mostly the host's work of describing it. Rows that
begin have nothing in any cache, so such a window is a function of its tokens and lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import pages_for, power_of_two
from omlx_worker.engine.kernels.compiling import compiles
from omlx_worker.engine.kernels.window import TAIL, Window, own_pages
from omlx_worker.engine.models.ragged_model import LayerCache, Layers, RaggedModel

WIDTHS = (16, 32, 48, 64, 96, 128)
"""Tokens of each row."""

MOST = 256
"""Tokens of all rows. Of larger windows the device's work is the larger part."""

PADDED = 1.5
"""A window becomes this much larger by padding, at most. Up to `CHEAP` tokens it may be more."""

CHEAP = 32
"""Tokens whose product takes a GPU as long as that of one."""

Shape = tuple[int, int]
"""Rows and tokens of each."""


def shapes(most_rows: int) -> list[Shape]:
    """All of them, the smallest first."""
    rows = [1 << power for power in range(power_of_two(most_rows).bit_length())]
    return [(count, width) for count in rows for width in WIDTHS if count * width <= MOST]


def shape_for(rows: int, width: int) -> Shape | None:
    """What a window is padded to; None if it is none of these."""
    fitting = (power_of_two(rows), min((w for w in WIDTHS if w >= width), default=MOST + 1))
    most = min(MOST, PADDED * max(CHEAP, rows * width))
    return fitting if fitting[0] * fitting[1] <= most else None


class FirstWindows:
    """Compiled windows of a model.

    Attributes:
        traces: how many were traced; stays 0 where nothing is compiled.
    """

    def __init__(self, model: RaggedModel) -> None:
        self.traces = 0
        self._model = model
        self._compiles = compiles()
        self._run = mx.compile(self._first)

    def prefill(self, tokens: mx.array, caches: Sequence[LayerCache], window: Window) -> mx.array:
        """See `RaggedModel.prefill`."""
        rows, width = tokens.shape[0], tokens.shape[1] - 1
        shape = shape_for(rows, width)
        begins = window.begins and self._model.pads
        if shape is None or window.lengths is None or not begins:
            return self._model.prefill(tokens, caches, window)
        extra = shape[0] - rows
        hidden, written = self._run(
            mx.pad(tokens, [(0, extra), (0, shape[1] - width)]),
            mx.pad(window.lengths, [(0, extra)]),
        )
        for cache, part in zip(caches, written, strict=True):
            if isinstance(cache, AttentionCache):
                cache.update([array[:rows, :, :width] for array in part])
            else:
                cache.update([array[:rows] for array in part])
        return hidden[:rows, :width]

    def _first(self, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, Layers]:
        self.traces += self._compiles
        rows, width = tokens.shape[0], tokens.shape[1] - 1
        caches = self._model.new_caches(rows, TAIL)
        window = Window.of_prompts(
            [0] * rows, [width] * rows, width, own_pages(rows, pages_for(TAIL))
        )
        hidden = self._model.prefill(tokens, caches, replace(window, lengths=lengths))
        return hidden, [cache.written for cache in caches]
