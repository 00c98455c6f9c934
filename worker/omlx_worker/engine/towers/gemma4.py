"""Gemma 4's vision tower, and its text model's forward with pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs
from PIL.Image import Image, Resampling

from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.towers.network import attend, load, room_to_attend
from omlx_worker.engine.towers.tower import Seen

COUNTS = (70, 140, 280, 560, 1120)
"""Most vectors of a picture that the models were trained with (transformers' names them too)."""

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass
class VisionArgs(BaseModelArgs):
    """The ``vision_config`` of a checkpoint."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] | None = None
    patch_size: int = 16
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10 * 1024
    use_clipped_linears: bool = False
    standardize: bool = False


class _Net(nn.Module):
    """The network, whose tensors have Hugging Face's names.

    Args:
        hidden: numbers of an embedding of the text model.
    """

    def __init__(self, args: VisionArgs, hidden: int) -> None:
        super().__init__()
        self.args = args
        self.vision_tower = tower = nn.Module()
        tower.patch_embedder = _PatchEmbedder(args)
        tower.encoder = nn.Module()
        tower.encoder.layers = [_Layer(args) for _ in range(args.num_hidden_layers)]
        if args.standardize:
            tower.std_bias = mx.zeros((args.hidden_size,))
            tower.std_scale = mx.ones((args.hidden_size,))
        self.embed_vision = nn.Module()
        self.embed_vision.embedding_projection = nn.Linear(args.hidden_size, hidden, bias=False)

    def __call__(self, pixels: mx.array) -> mx.array:
        """``[height, width, 3]`` uint8 to vectors ``[N, hidden]``, row by row."""
        args, tower = self.args, self.vision_tower
        rows, columns = (side // args.patch_size for side in pixels.shape[:2])
        turn = _turn_of(args, rows, columns)
        x = tower.patch_embedder(pixels)
        for layer in tower.encoder.layers:
            x = layer(x, turn)
        square = args.pooling_kernel_size
        squares = x.reshape(rows // square, square, columns // square, square, -1)
        # Scaled by the root of the size, they may be too large for half precision.
        pooled = squares.astype(mx.float32).mean(axis=(1, 3)).flatten(0, 1)
        pooled = pooled.astype(x.dtype).astype(mx.float32) * args.hidden_size**0.5
        if args.standardize:
            pooled = (pooled - tower.std_bias) * tower.std_scale
        normed = mx.fast.rms_norm(pooled.astype(x.dtype), None, args.rms_norm_eps)
        vectors: mx.array = self.embed_vision.embedding_projection(normed)
        return vectors

    def room(self, patches: int) -> int:
        """Bytes that a call takes in passing, about."""
        args = self.args
        size: int = self.vision_tower.patch_embedder.position_embedding_table.itemsize
        heads = (args.num_attention_heads + args.num_key_value_heads) * args.head_dim
        numbers = 4 * args.hidden_size + 3 * max(2 * heads, args.intermediate_size)
        pixels = 3 * args.patch_size**2 * 3 * mx.float32.size
        scores = room_to_attend(args.num_attention_heads, patches, size)
        return patches * (size * numbers + pixels) + scores


class _PatchEmbedder(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        self._patch = args.patch_size
        self.input_proj = nn.Linear(3 * args.patch_size**2, args.hidden_size, bias=False)
        places = (2, args.position_embedding_size, args.hidden_size)
        self.position_embedding_table = mx.zeros(places)

    def __call__(self, pixels: mx.array) -> mx.array:
        size, (height, width, _) = self._patch, pixels.shape
        rows, columns = height // size, width // size
        across, down = self.position_embedding_table
        patches = pixels.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
        values = 2 * (patches.reshape(rows, columns, -1).astype(mx.float32) * (1 / 255) - 0.5)
        x = self.input_proj(values.astype(across.dtype))
        out: mx.array = x + (across[:columns] + down[:rows, None])
        return out.flatten(0, 1)


class _Layer(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        size, inner = args.hidden_size, args.intermediate_size
        self.self_attn = _Attention(args)
        self.mlp = nn.Module()
        for name, sizes in (
            ("gate", (size, inner)),
            ("up", (size, inner)),
            ("down", (inner, size)),
        ):
            self.mlp[f"{name}_proj"] = _Linear(*sizes, clips=args.use_clipped_linears)
        for name in (
            *("input_layernorm", "post_attention_layernorm"),
            *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ):
            self[name] = nn.RMSNorm(size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, turn: _Turn) -> mx.array:
        mixed = self.self_attn(self.input_layernorm(x), turn)
        x = x + self.post_attention_layernorm(mixed)
        mlp, normed = self.mlp, self.pre_feedforward_layernorm(x)
        fed = mlp.down_proj(nn.gelu_approx(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        out: mx.array = x + self.post_feedforward_layernorm(fed)
        return out


class _Attention(nn.Module):
    def __init__(self, args: VisionArgs) -> None:
        super().__init__()
        size, clips = args.hidden_size, args.use_clipped_linears
        self._dims = args.head_dim
        mixed, kept = (
            heads * args.head_dim for heads in (args.num_attention_heads, args.num_key_value_heads)
        )
        self.q_proj = _Linear(size, mixed, clips=clips)
        self.k_proj = _Linear(size, kept, clips=clips)
        self.v_proj = _Linear(size, kept, clips=clips)
        self.o_proj = _Linear(mixed, size, clips=clips)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, turn: _Turn) -> mx.array:
        queries, keys, values = (
            project(x).reshape(len(x), -1, self._dims)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = (
            _turned(norm(part), turn)
            for norm, part in ((self.q_norm, queries), (self.k_norm, keys))
        )
        values = mx.fast.rms_norm(values, None, self.q_norm.eps)
        queries, keys, values = (part.swapaxes(0, 1)[None] for part in (queries, keys, values))
        mixed = attend(queries, keys, values, 1.0)
        out: mx.array = self.o_proj(mixed[0].swapaxes(0, 1).flatten(1))
        return out


class _Linear(nn.Module):
    """A linear layer whose input and output keep within bounds of the checkpoint, if ``clips``."""

    def __init__(self, inputs: int, outputs: int, *, clips: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)
        if clips:
            for name in _BOUNDS:
                self[name] = mx.array(-mx.inf if name.endswith("min") else mx.inf)

    def __call__(self, x: mx.array) -> mx.array:
        if "input_min" not in self:
            out: mx.array = self.linear(x)
            return out
        x = self.linear(mx.clip(x, self.input_min, self.input_max))
        return mx.clip(x, self.output_min, self.output_max)


_Turn = tuple[mx.array, mx.array]
"""Cosines and sines ``[L, 1, 2, 1, dims / 4]`` of patches, by their column and their row."""


def _turn_of(args: VisionArgs, rows: int, columns: int) -> _Turn:
    pairs = args.head_dim // 4
    periods = mx.power(
        (args.rope_parameters or {}).get("rope_theta", 100.0), mx.arange(pairs) / pairs
    )
    down, across = mx.meshgrid(mx.arange(rows), mx.arange(columns), indexing="ij")
    places = mx.stack([across.flatten(), down.flatten()], axis=1)
    angles = places[:, None, :, None, None] / periods
    return mx.cos(angles), mx.sin(angles)


def _turned(x: mx.array, turn: _Turn) -> mx.array:
    """Rotate ``[L, H, dims]``: the first half of each head by columns, the other by rows."""
    cos, sin = (part.astype(x.dtype) for part in turn)
    one, two = mx.split(mx.unflatten(x, -1, (2, 2, -1)), 2, axis=-2)
    return mx.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-2).reshape(x.shape)


class Gemma4Sight:
    """How prompts of a Gemma 4 show pictures; see `omlx_worker.engine.rows.picture.Sight`.

    Args:
        config: of the checkpoint.
        processor: its settings of pictures.
        max_pixels: of a resized picture, at most; None for the checkpoint's own limit.

    Raises:
        LookupError, ValueError: if one of them is not as it should be.
        ModelError: if so few pixels are too few.
    """

    spatial = False

    def __init__(
        self, config: Mapping[str, Any], processor: Mapping[str, Any], max_pixels: int | None
    ) -> None:
        self.token: int = config["image_token_id"]
        self.around: tuple[tuple[int, ...], tuple[int, ...]] = (
            (config["boi_token_id"],),
            (config["eoi_token_id"],),
        )
        self.both_ways = config["text_config"].get("use_bidirectional_attention") == "vision"
        self._args = VisionArgs.from_dict(config["vision_config"])
        # Pixels of a vector's side.
        self._side = self._args.patch_size * self._args.pooling_kernel_size
        own = processor.get("max_soft_tokens") or config.get("vision_soft_tokens_per_image", 280)
        self.most: int = self._allowed(max_pixels) if max_pixels else own

    def _allowed(self, max_pixels: int) -> int:
        least = COUNTS[0] * self._side**2
        if max_pixels < least:
            raise ModelError(
                f"--max-pixels {max_pixels}: a Gemma 4 takes pictures of {least} pixels and more; "
                "give at least as many"
            )
        return max(count for count in COUNTS if count * self._side**2 <= max_pixels)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of the vectors of a picture with this size in pixels.

        It is made as large as `most` allows.
        """
        factor = math.sqrt(self.most * self._side**2 / (height * width))
        rows = math.floor(factor * height / self._side)
        columns = math.floor(factor * width / self._side)
        if not rows:
            return 1, min(width // height, self.most)
        if not columns:
            return min(height // width, self.most), 1
        return rows, columns


class Gemma4Tower(Gemma4Sight):
    """The tower of a checkpoint; see `omlx_worker.engine.towers.tower.Tower`.

    Args:
        weights: by the names that transformers has, packed or not.

    Raises:
        LookupError, ValueError: if they are not those of such a tower.
    """

    sections: Sequence[int] = ()

    def __init__(
        self,
        config: Mapping[str, Any],
        processor: Mapping[str, Any],
        max_pixels: int | None,
        weights: Mapping[str, mx.array],
    ) -> None:
        super().__init__(config, processor, max_pixels)
        self.width: int = config["text_config"]["hidden_size"]
        self._net = _Net(self._args, self.width)
        if not self._args.use_clipped_linears:
            weights = {n: weight for n, weight in weights.items() if not n.endswith(_BOUNDS)}
        self.weight_bytes = load(self._net, weights, config)

    def see(self, picture: Image) -> mx.array:
        rows, columns = self.grid(*picture.size)
        size = columns * self._side, rows * self._side
        vectors: mx.array = self._net(
            mx.array(np.asarray(picture.resize(size, Resampling.BICUBIC)))
        )
        return vectors

    def room(self, vectors: int) -> int:
        return self._net.room(vectors * self._args.pooling_kernel_size**2)

    def run(self, text: Any, tokens: mx.array, seen: Seen, views: Sequence[Any]) -> mx.array:
        # The model scales embeddings, but no vectors.
        hidden = text.embed_tokens(tokens) * text.embed_scale
        hidden = mx.where(seen.where[..., None], seen.vectors.astype(hidden.dtype), hidden)
        inputs = None
        if text.hidden_size_per_layer_input:
            inputs = text._get_per_layer_inputs(mx.where(seen.where, 0, tokens))
        text = copy(text)
        text.embed_scale = 1.0
        out: mx.array = text(
            tokens, cache=list(views), input_embeddings=hidden, per_layer_inputs=inputs
        )
        return out
