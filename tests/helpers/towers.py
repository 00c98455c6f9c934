"""Tiny vision towers with random weights, and pictures to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from omlx_worker.engine.towers.tower import Tower

QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "num_position_embeddings": 36,
    "hidden_act": "gelu_pytorch_tanh",
}
QWEN_PICTURES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 4096, "longest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}
"""Between 4 and 64 vectors a picture."""
QWEN_TOKENS = {"image_token_id": 200, "video_token_id": 300, "vision_start_token_id": 202}
_ROPE: dict[str, Any] = {"type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def drawn(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def taken_by(tower: Tower, picture: Image.Image) -> int:
    """Bytes that looking at a picture takes in passing, once the tower has looked at one."""
    mx.eval(tower.see(picture))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(tower.see(picture))
    return int(mx.get_peak_memory() - before)


def png(width: int, height: int, seed: int = 0) -> bytes:
    """The file of a `drawn` picture."""
    file = BytesIO()
    drawn(width, height, seed).save(file, "PNG")
    return file.getvalue()


def qwen_weights(vision: dict[str, Any], seed: int = 0) -> dict[str, mx.array]:
    """Of a tower, by Hugging Face's names, so large that softmax and norms matter.

    Args:
        vision: its configuration.
    """
    draw = np.random.default_rng(seed).standard_normal
    size, inner, out = (vision[f"{each}_size"] for each in ("hidden", "intermediate", "out_hidden"))
    deep = len(vision["deepstack_visual_indexes"])
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj": (size, 3, 2, 16, 16),
        "pos_embed": (vision["num_position_embeddings"], size),
    }
    for n in range(vision["depth"]):
        shapes |= {
            f"blocks.{n}.norm1": (size,),
            f"blocks.{n}.norm2": (size,),
            f"blocks.{n}.attn.qkv": (3 * size, size),
            f"blocks.{n}.attn.proj": (size, size),
            f"blocks.{n}.mlp.linear_fc1": (inner, size),
            f"blocks.{n}.mlp.linear_fc2": (size, inner),
        }
    for merger in ("merger", *(f"deepstack_merger_list.{n}" for n in range(deep))):
        shapes |= {
            f"{merger}.norm": (size,) if merger == "merger" else (4 * size,),
            f"{merger}.linear_fc1": (4 * size, 4 * size),
            f"{merger}.linear_fc2": (out, 4 * size),
        }
    weights = {}
    for name, shape in shapes.items():
        scale = 2 / np.sqrt(np.prod(shape[1:])) if "pos_embed" not in name else 1.0
        value = draw(shape) * scale if len(shape) > 1 else 1 + 0.2 * draw(shape)
        weights[f"{name}.weight"] = mx.array(value.astype(np.float32))
        if "pos_embed" not in name:
            weights[f"{name}.bias"] = mx.array((0.2 * draw(shape[0])).astype(np.float32))
    return weights


def add_qwen_tower(
    path: Path,
    deep: int = 0,
    *,
    token: int = QWEN_TOKENS["image_token_id"],
    pictures: Mapping[str, Any] = {},
    dtype: mx.Dtype = mx.float32,
    **vision: Any,
) -> Path:
    """Give a checkpoint of a Qwen a tower.

    Args:
        path: from `tests.helpers.checkpoints`, or an empty folder, which becomes one without a text
            model.
        deep: layers of the text model that take features of their own.
        token: where vectors stand.
        pictures: settings of its processor, in place of some of `QWEN_PICTURES`.
        dtype: of its tensors.
        vision: parts of its configuration, in place of some of `QWEN_VISION`.
    """
    file = path / "config.json"
    if file.is_file():
        config = json.loads(file.read_text())
    else:
        config = {"model_type": "qwen3_vl" if deep else "qwen3_5", "text_config": {}}
    text = config["text_config"]
    vision = QWEN_VISION | {"deepstack_visual_indexes": list(range(deep))} | vision
    vision |= {"model_type": config["model_type"]}
    vision["out_hidden_size"] = text.get("hidden_size", vision["out_hidden_size"])
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not rope:
        turn = {"rope_theta": 100_000, "partial_rotary_factor": 0.25}
        text["rope_parameters"] = _ROPE | turn
    config |= {"vision_config": vision} | QWEN_TOKENS | {"image_token_id": token}
    file.write_text(json.dumps(config))
    weights = qwen_weights(vision)
    named = {f"model.visual.{name}": value.astype(dtype) for name, value in weights.items()}
    mx.save_safetensors(str(path / "model-tower.safetensors"), named, {"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text())["weight_map"]
        files |= dict.fromkeys(named, "model-tower.safetensors")
        index.write_text(json.dumps({"weight_map": files}))
    (path / "preprocessor_config.json").write_text(json.dumps(QWEN_PICTURES | pictures))
    return path
