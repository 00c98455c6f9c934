"""The likeliest texts after prompts with pictures, by mlx-vlm's own forward of a Qwen.

To be run in a process of its own, which mlx-vlm patches: ``mlx_vlm_greedy.py CHECKPOINT TOKENS <
PROMPTS > TEXTS``. Prompts are JSON, lists of tokens and of the names of pictures, texts lists of
tokens. Nothing is kept between tokens.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
    Qwen3VLImageProcessor,
    _qwen_vl_image_kwargs,
)
from mlx_vlm.utils import load_model
from PIL import Image


def main(path: str, tokens: str) -> None:
    model = load_model(Path(path))
    model.set_dtype(mx.float32)
    processor = Qwen3VLImageProcessor(**_qwen_vl_image_kwargs(path))
    texts = []
    for prompt in json.load(sys.stdin):
        ids, seen = [], {}
        if files := [part for part in prompt if isinstance(part, str)]:
            inputs = processor([Image.open(file) for file in files])
            seen = {name: mx.array(value) for name, value in inputs.items()}
        grids = iter(seen.get("image_grid_thw", mx.zeros((0, 3))).tolist())
        for part in prompt:
            if isinstance(part, str):
                time, height, width = next(grids)
                start, image = model.config.vision_start_token_id, model.config.image_token_id
                ids += [start, *[image] * (time * height * width // 4)]
            else:
                ids.append(part)
        text = []
        for _ in range(int(tokens)):
            scores = model(mx.array([[*ids, *text]]), **seen).logits[0, -1]
            text.append(scores.argmax().item())
        texts.append(text)
    json.dump(texts, sys.stdout)


main(*sys.argv[1:])
