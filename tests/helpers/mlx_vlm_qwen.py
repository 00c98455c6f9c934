"""What mlx-vlm makes of pictures with a Qwen's tower.

To be run in a process of its own, which mlx-vlm patches: ``mlx_vlm_qwen.py CHECKPOINT OUTPUT
PICTURE... < SIZES``, where sizes are a JSON list of widths and heights. Writes ``pixels.N``,
``grid.N`` and ``vectors.N`` of each picture, features of inner blocks beside, and ``grids``, rows
and columns of vectors by the sizes.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_vlm.models.qwen3_vl import VisionModel
from mlx_vlm.models.qwen3_vl.config import VisionConfig
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLImageProcessor,
    _qwen_vl_image_kwargs,
)
from PIL import Image


def main(path: str, output: str, *pictures: str) -> None:
    config = json.loads(Path(path, "config.json").read_text())
    tower = VisionModel(VisionConfig.from_dict(config["vision_config"]))
    weights = mx.load(str(Path(path, "model-tower.safetensors")))
    named = {name.removeprefix("model.visual."): value for name, value in weights.items()}
    tower.load_weights(list(tower.sanitize(named).items()))
    processor = Qwen3VLImageProcessor(**_qwen_vl_image_kwargs(path))
    resized = [processor._resolved_size(height, width) for width, height in json.load(sys.stdin)]
    made = {"grids": mx.array(resized) // 32}
    for n, picture in enumerate(pictures):
        inputs = processor([Image.open(picture)])
        pixels, grid = mx.array(inputs["pixel_values"]), mx.array(inputs["image_grid_thw"])
        vectors, deep = tower(pixels, grid)
        made |= {f"pixels.{n}": pixels, f"grid.{n}": grid[0]}
        made[f"vectors.{n}"] = mx.concatenate([vectors, *deep], axis=-1)
    mx.save_safetensors(output, made)


main(*sys.argv[1:])
