"""What mlx-vlm makes of pictures with a Gemma 4, and its greedy texts.

To be run in a process of its own, which mlx-vlm patches: ``mlx_vlm_gemma.py CHECKPOINT OUTPUT
PICTURE... < ASKED``. Asked is JSON: ``sizes``, a list of widths and heights; ``prompts``, each a
list of token ids with ``{"picture": N}`` for a picture's vectors; and ``tokens``, how many of a
text. Writes ``vectors.N`` of each picture, ``grids``, rows and columns by the sizes, and ``text.N``
of each prompt.
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.gemma4 import Model, ModelConfig
from mlx_vlm.models.gemma4.config import TextConfig, VisionConfig
from mlx_vlm.models.gemma4.processing_gemma4 import (
    Gemma4ImageProcessor,
    get_aspect_ratio_preserving_size,
)
from PIL import Image


def main(path: str, output: str, *pictures: str) -> None:
    asked = json.load(sys.stdin)
    config = json.loads(Path(path, "config.json").read_text())
    settings = json.loads(Path(path, "processor_config.json").read_text())["image_processor"]
    vision = VisionConfig.from_dict(config["vision_config"])
    whole = ModelConfig.from_dict(config)
    whole.text_config, whole.vision_config = TextConfig.from_dict(config["text_config"]), vision
    model = Model(whole)
    model.load_weights(list(model.sanitize(mx.load(str(Path(path, "model.safetensors")))).items()))
    patch, pool, most = vision.patch_size, vision.pooling_kernel_size, settings["max_soft_tokens"]
    processor = Gemma4ImageProcessor(
        patch_size=patch, pooling_kernel_size=pool, max_soft_tokens=most
    )
    sizes = [
        get_aspect_ratio_preserving_size(height, width, patch, most * pool**2, pool)
        for width, height in asked["sizes"]
    ]
    pixels = [mx.array(processor([Image.open(picture)])[0]["pixel_values"]) for picture in pictures]
    made = {f"vectors.{n}": model.encode_image(each)[0] for n, each in enumerate(pixels)}
    made["grids"] = mx.array(sizes) // (patch * pool)
    for n, prompt in enumerate(asked["prompts"]):
        made[f"text.{n}"] = mx.array(text(model, prompt, pixels, made, asked["tokens"]))
    mx.save_safetensors(output, made)


def text(
    model: Any, prompt: list[Any], pixels: list[mx.array], made: dict[str, mx.array], count: int
) -> list[int]:
    ids, seen = list[int](), list[int]()
    for part in prompt:
        if isinstance(part, dict):
            seen.append(part["picture"])
            ids += [model.config.image_token_id] * len(made[f"vectors.{part['picture']}"])
        else:
            ids.append(part)
    tokens = mx.array([ids])
    given = {}
    if seen:
        given["pixel_values"] = [pixels[n] for n in seen] if len(seen) > 1 else pixels[seen[0]]
        given["mm_token_type_ids"] = (tokens == model.config.image_token_id).astype(mx.int32)
    cache = make_prompt_cache(model.language_model)
    logits = model(tokens, cache=cache, **given).logits
    out = list[int]()
    for _ in range(count):
        out.append(int(logits[0, -1].argmax().item()))
        logits = model.language_model(mx.array([[out[-1]]]), cache=cache).logits
    return out


main(*sys.argv[1:])
