"""The vision tower of Qwen3-VL, which Qwen3.5 and later have too.

A picture is resized once, to whole squares of patches, and each square becomes a vector. Qwen3-VL
also takes features of the tower's inner blocks, which its text model adds after its first layers
(DeepStack). Source: the Qwen3-VL technical report (arXiv 2511.21631) and transformers'
``Qwen3VLVisionModel`` and ``Qwen2VLImageProcessor``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from PIL.Image import Image, Resampling

from omlx_worker.engine.rows.picture_file import MOST_RATIO
from omlx_worker.engine.towers.network import attend, load, room_to_attend
from omlx_worker.engine.towers.tower import Seen

EPSILON = 1e-6
"""Of all norms."""
PERIOD = 10_000.0
"""Of the slowest rotation."""


class Qwen3VLSight:
    """How prompts of the family show pictures; see `omlx_worker.engine.rows.picture.Sight`.

    Args:
        config: of the checkpoint.
        processor: its settings of pictures.
        max_pixels: of a resized picture, at most; None for the checkpoint's own limit.
    """

    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    spatial = True
    both_ways = False

    def __init__(
        self, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int | None
    ) -> None:
        self.token: int = config["image_token_id"]
        self._patch: int = processor.get("patch_size", 16)
        self._merge: int = processor.get("merge_size", 2)
        self._resampling = Resampling(processor.get("resample", Resampling.BICUBIC))
        self._mean = processor.get("image_mean") or [0.5, 0.5, 0.5]
        self._deviation = processor.get("image_std") or [0.5, 0.5, 0.5]
        size = processor.get("size") or {}
        least = processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        self._most: int = max_pixels or most
        self._least: int = min(least, self._most)
        self._side = self._patch * self._merge
        # Of the longest strip, as long as it may be and as wide as a vector, or enlarged.
        strip = self._side * math.sqrt(MOST_RATIO * self._most)
        longer, shorter = math.sqrt(MOST_RATIO * self._least), math.sqrt(self._least / MOST_RATIO)
        enlarged = (longer + self._side) * (shorter + self._side)
        self.most = int(max(self._most, strip, enlarged)) // self._side**2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the vectors of a picture with this size in pixels.

        Its sides become multiples of a vector's, the nearest ones if these have no more pixels than
        the limits allow.
        """
        side = self._side
        rows, columns = round(height / side), round(width / side)
        pixels = rows * columns * side**2
        if pixels > self._most:
            shrink = math.sqrt(height * width / self._most)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif pixels < self._least:
            grow = math.sqrt(self._least / (height * width))
            rows = math.ceil(height * grow / side)
            columns = math.ceil(width * grow / side)
        return rows, columns

    def patches(self, picture: Image) -> mx.array:
        """The normalised pixels of a picture, ``[patches, colours * side * side]`` in float32.

        The patches of a vector follow one another, by rows within and without.
        """
        rows, columns = self.grid(*picture.size)
        merge, patch = self._merge, self._patch
        size = columns * self._side, rows * self._side
        pixels = mx.array(np.asarray(picture.resize(size, self._resampling)))
        pixels = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
        pixels = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch * patch)
        mean, deviation = mx.array([self._mean, self._deviation])[..., None]
        return ((pixels.astype(mx.float32) * (1 / 255) - mean) / deviation).flatten(1)


class Qwen3VLTower(Qwen3VLSight):
    """The tower of a checkpoint; see `omlx_worker.engine.towers.tower.Tower`.

    Args:
        weights: by the names that transformers has within a tower, packed or not.

    Raises:
        LookupError, ValueError: if they are not those of such a tower.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        max_pixels: int | None,
        weights: Mapping[str, mx.array],
    ) -> None:
        super().__init__(config, processor, max_pixels)
        vision, text = config["vision_config"], config["text_config"]
        rope = text.get("rope_parameters") or text.get("rope_scaling")
        self.sections: Sequence[int] = rope["mrope_section"]
        self._hidden: int = vision["out_hidden_size"]
        self._net = _Net(vision)
        self.width = self._hidden * (1 + len(self._net.deep))
        self.weight_bytes = load(self._net, _as_product(weights), config)

    def see(self, picture: Image) -> mx.array:
        vectors: mx.array = self._net(self.patches(picture), *self.grid(*picture.size))
        return vectors

    def room(self, vectors: int) -> int:
        room: int = self._net.room(vectors * self._merge**2)
        return room

    def run(self, text: Any, tokens: mx.array, seen: Seen, views: Sequence[Any]) -> mx.array:
        hidden = text.embed_tokens(tokens)
        first, *deep = mx.split(
            seen.vectors.astype(hidden.dtype), self.width // self._hidden, axis=-1
        )
        hidden = mx.where(seen.where[..., None], first, hidden)
        if not deep:
            out: mx.array = text(tokens, cache=views, input_embeddings=hidden)
            return out
        mask = views[0].make_mask(tokens.shape[1])
        for n, (layer, view) in enumerate(zip(text.layers, views, strict=True)):
            hidden = layer(hidden, mask, view)
            if n < len(deep):
                hidden = hidden + deep[n]  # zeros elsewhere
        normed: mx.array = text.norm(hidden)
        return normed


class _Net(nn.Module):
    """The network, whose tensors have transformers' names but for the first product."""

    def __init__(self, vision: Mapping[str, Any]) -> None:
        super().__init__()
        self.size: int = vision["hidden_size"]
        self.inner: int = vision["intermediate_size"]
        self.heads: int = vision["num_heads"]
        self.out: int = vision["out_hidden_size"]
        self.merge, self.frames = vision["spatial_merge_size"], vision["temporal_patch_size"]
        self.deep = list(vision.get("deepstack_visual_indexes") or [])
        places = vision["num_position_embeddings"]
        self.places = math.isqrt(places)
        self.patch_embed = nn.Linear(3 * self.frames * vision["patch_size"] ** 2, self.size)
        self.pos_embed = nn.Embedding(places, self.size)
        self.blocks = [_Block(self.size, self.inner, self.heads) for _ in range(vision["depth"])]
        self.merger = _Merger(self.size, self.merge**2, self.out, whole=False)
        self.deepstack_merger_list = [
            _Merger(self.size, self.merge**2, self.out, whole=True) for _ in self.deep
        ]

    def __call__(self, patches: mx.array, rows: int, columns: int) -> mx.array:
        """The vectors ``[rows * columns, (1 + deep) * out]`` of a picture.

        Args:
            patches: ``[patches, 3 * side * side]``, those of a vector one after the other.
        """
        merge, width = self.merge, columns * self.merge
        order = mx.arange(rows * merge * width).reshape(rows, merge, columns, merge)
        order = order.swapaxes(1, 2).flatten()
        x = self.patch_embed(mx.tile(patches.astype(self.patch_embed.bias.dtype), (1, self.frames)))
        x = x + self._places(rows * merge, width)[order].astype(x.dtype)
        pairs = self.size // self.heads // 4
        periods = PERIOD ** (mx.arange(pairs) / pairs)
        angles = mx.concatenate(
            [each[:, None] / periods for each in (order // width, order % width)], axis=-1
        )
        cosines, sines = mx.cos(angles), mx.sin(angles)
        features = []
        for n, block in enumerate(self.blocks):
            x = block(x, cosines, sines)
            if n in self.deep:
                features.append(self.deepstack_merger_list[self.deep.index(n)](x))
        vectors: mx.array = mx.concatenate([self.merger(x), *features], axis=-1)
        return vectors

    def _places(self, rows: int, columns: int) -> mx.array:
        """``[rows * columns, size]``, the square of learned positions spread over a picture."""
        table = self.pos_embed(mx.arange(self.places**2)).astype(mx.float32)

        def weights(count: int) -> mx.array:
            points = mx.linspace(0, self.places - 1, count)[:, None]
            return mx.maximum(0, 1 - mx.abs(points - mx.arange(self.places)))

        down = weights(rows) @ table.reshape(self.places, -1)
        across = weights(columns) @ down.reshape(rows, self.places, -1)
        spread: mx.array = across.flatten(0, 1)
        return spread

    def room(self, patches: int) -> int:
        """Bytes that a call takes in passing, about."""
        each: int = self.patch_embed.bias.itemsize
        numbers = 8 * self.size + 3 * self.inner
        # Patches, and what is rotated, are in float32.
        floats: int = 2 * self.patch_embed.weight.shape[1] + 11 * self.size
        scores = room_to_attend(self.heads, patches, each)
        return patches * (numbers * each + floats * 4) + scores


def _as_product(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights with a product in place of the convolution, since patches do not overlap."""
    weights = dict(weights)
    kernel = weights.pop("patch_embed.proj.weight")
    if kernel.shape[-1] == 3:  # MLX has colours last
        kernel = kernel.moveaxis(-1, 1)
    weights["patch_embed.weight"] = kernel.swapaxes(1, 2).flatten(1)
    weights["patch_embed.bias"] = weights.pop("patch_embed.proj.bias")
    return weights


class _Block(nn.Module):
    def __init__(self, size: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=EPSILON), nn.LayerNorm(size, eps=EPSILON)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp.linear_fc1, self.mlp.linear_fc2 = nn.Linear(size, inner), nn.Linear(inner, size)

    def __call__(self, x: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
        """``[patches, size]`` to the same, rotated by ``[patches, head / 2]``."""
        projected = self.attn.qkv(self.norm1(x)).reshape(len(x), 3, self.heads, -1)
        queries, keys, values = projected.transpose(1, 2, 0, 3)[:, None]

        def turned(each: mx.array) -> mx.array:
            first, second = mx.split(each.astype(mx.float32), 2, axis=-1)
            parts = [first * cosines - second * sines, second * cosines + first * sines]
            return mx.concatenate(parts, axis=-1).astype(each.dtype)

        scale = queries.shape[-1] ** -0.5
        mixed = attend(turned(queries), turned(keys), values, scale)
        x = x + self.attn.proj(mixed[0].swapaxes(0, 1).flatten(1))
        hidden = nn.gelu_approx(self.mlp.linear_fc1(self.norm2(x)))
        out: mx.array = x + self.mlp.linear_fc2(hidden)
        return out


class _Merger(nn.Module):
    """Makes a vector of the patches in a square.

    Args:
        whole: whether they are normed together.
    """

    def __init__(self, size: int, patches: int, out: int, *, whole: bool) -> None:
        super().__init__()
        self.joined = size * patches
        self.whole = whole
        self.norm = nn.LayerNorm(self.joined if whole else size, eps=EPSILON)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, out)

    def __call__(self, x: mx.array) -> mx.array:
        if self.whole:
            x = x.reshape(-1, self.joined)
        x = self.norm(x).reshape(-1, self.joined)
        out: mx.array = self.linear_fc2(nn.gelu(self.linear_fc1(x)))
        return out
