"""Small pictures, a tower that tells them apart, and what mlx-lm's model makes of them alone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from PIL import Image

from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.towers.tower import Seen

CELL = 4
"""Pixels of a vector, each way."""

PAD = 5
"""Stands in prompts where a vector goes."""


def png(columns: int, rows: int, seed: int = 0) -> bytes:
    """A file of noise with a vector for each cell of this grid."""
    noise = np.random.default_rng(seed).integers(0, 256, (rows * CELL, columns * CELL, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


class SmallTower:
    """A vector for every cell, which depends on the cell alone."""

    token, around, most = PAD, ((), ()), 64
    spatial = True
    weight_bytes = 0
    both_ways = False

    def __init__(self, width: int, sections: Sequence[int] = (3, 3, 2)) -> None:
        self.width, self.sections = width, sections
        self.looks = 0
        key = mx.random.key(7)
        self._into = mx.random.normal((CELL * CELL * 3, width), key=key) * 0.02

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // CELL, width // CELL

    def see(self, picture: Image.Image) -> mx.array:
        self.looks += 1
        columns, rows = picture.width // CELL, picture.height // CELL
        pixels = mx.array(np.asarray(picture)).astype(mx.float32) / 128 - 1
        cells = pixels.reshape(rows, CELL, columns, CELL, 3).swapaxes(1, 2)
        return cells.reshape(rows * columns, -1) @ self._into

    def room(self, vectors: int) -> int:
        return 4 * vectors * self.width

    def run(self, text: Any, tokens: mx.array, seen: Seen, views: Sequence[Any]) -> mx.array:
        embedded = mx.where(seen.where[..., None], seen.vectors, text.embed_tokens(tokens))
        hidden: mx.array = text(tokens, cache=views, input_embeddings=embedded)
        return hidden


def prompt_of(*parts: Sequence[int] | bytes) -> tuple[list[int], tuple[Picture, ...]]:
    """A prompt of tokens and files of pictures, in this order."""
    prompt, pictures = list[int](), list[Picture]()
    for part in parts:
        if isinstance(part, bytes):
            width, height = Image.open(io.BytesIO(part)).size
            rows, columns = height // CELL, width // CELL
            picture = Picture(len(prompt), rows, columns, part, spatial=True)
            pictures.append(picture)
            prompt += [PAD] * picture.count
        else:
            prompt += part
    return prompt, tuple(pictures)


def greedy(
    network: nn.Module,
    tower: SmallTower,
    prompt: Sequence[int],
    pictures: Sequence[Picture],
    tokens: int,
) -> list[tuple[int, float]]:
    """The likeliest tokens, in mlx-lm's own caches, with their log-probabilities.

    The rotary positions are computed here a second time, as Qwen's own code does it: a picture's
    begin at the largest before it plus one, and are that plus the row or column.
    """
    text, out = network.language_model.model, list[tuple[int, float]]()
    layers = [layer for layer in text.layers if not layer.is_linear]
    ropes = [layer.self_attn.rope for layer in layers]
    vectors = {
        each.start: tower.see(Image.open(io.BytesIO(each.data)).convert("RGB")) for each in pictures
    }
    cache, read = make_prompt_cache(network), 0
    try:
        for _ in range(tokens):
            ids = [*prompt, *(token for token, _ in out)]
            time, down, across, embedded = list[int](), list[int](), list[int](), list[mx.array]()
            place = 0
            while place < len(ids):
                following = max([*time, *down, *across], default=-1) + 1
                picture = next((each for each in pictures if each.start == place), None)
                count = picture.count if picture else 1
                for n in range(count):
                    time.append(following)
                    down.append(following + (n // picture.columns if picture else 0))
                    across.append(following + (n % picture.columns if picture else 0))
                embedded.append(
                    vectors[place] if picture else text.embed_tokens(mx.array([ids[place]]))
                )
                place += count
            turns = [time[read:], down[read:], across[read:]]
            for layer, rope in zip(layers, ropes, strict=True):
                layer.self_attn.rope = _Turned(rope, turns, tower.sections)
            new = mx.concatenate(embedded)[None, read:]
            hidden = text(mx.array([ids[read:]]), cache=cache, input_embeddings=new)
            read = len(ids)
            logits = text.embed_tokens.as_linear(hidden[0, -1])
            token = int(logits.argmax().item())
            out.append((token, (logits[token] - mx.logsumexp(logits)).item()))
    finally:
        for layer, rope in zip(layers, ropes, strict=True):
            layer.self_attn.rope = rope
    return out


class _Turned(nn.Module):
    """Rotates by positions of three kinds, pair by pair."""

    def __init__(self, rope: Any, positions: Sequence[list[int]], sections: Sequence[int]) -> None:
        super().__init__()
        pairs = rope.dims // 2
        axis = [0] * pairs
        for kind in (1, 2):
            for n in range(kind, 3 * sections[kind], 3):
                axis[n] = kind
        angles = [
            [positions[axis[n]][at] / rope.base ** (2 * n / rope.dims) for n in range(pairs)]
            for at in range(len(positions[0]))
        ]
        self._cos, self._sin = mx.cos(mx.array(angles)), mx.sin(mx.array(angles))
        self._pairs = pairs

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        del offset
        one, other = x[..., : self._pairs], x[..., self._pairs : 2 * self._pairs]
        turned = [one * self._cos - other * self._sin, other * self._cos + one * self._sin]
        return mx.concatenate([*turned, x[..., 2 * self._pairs :]], axis=-1)
