"""Rotary positions of prompts with pictures: by time, height and width (M-RoPE, as in Qwen2-VL)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omlx_worker.engine.rows.picture import Picture


def positions_of(pictures: Sequence[Picture], start: int, end: int) -> Any:
    """The rotary positions of a prompt's tokens by time, height and width, ``[3, end - start]``."""
    out = np.tile(np.arange(end, dtype=np.int32), (3, 1))
    for picture in pictures:
        first = out[0, picture.start] if picture.start < end else 0
        down, across = np.divmod(np.arange(picture.count), picture.columns)
        if picture.spatial:
            within = np.stack([0 * down, down, across])[:, : max(0, end - picture.start)]
            out[:, picture.start : picture.end] = first + within
            out[:, picture.end :] += picture.span - picture.count
    return out[:, start:]


def kinds_of(sections: Sequence[int]) -> list[int]:
    """By which kind of position each pair of rotated numbers turns: 0, 1 or 2, see `positions_of`.

    They take turns until height and width have as many as they ask for (Qwen3-VL's interleaved
    M-RoPE).

    Args:
        sections: pairs by time, height and width.
    """
    pairs = range(sum(sections))
    return [n % 3 if n < 3 * sections[n % 3] else 0 for n in pairs]
