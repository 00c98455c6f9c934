"""A Gemma 4's texts after pictures are those of transformers' PyTorch model.

mlx-vlm lets the tokens of a picture see those after them in all layers; transformers, in those with
a sliding window alone, as far as it reaches.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import transformers

from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.picture_file import pixels_of
from omlx_worker.engine.rows.request import RowRequest
from tests.helpers.decoding import run
from tests.helpers.gemma_towers import CLIPPED, IMAGE, PICTURES, VISION, Gemma, write_gemma
from tests.helpers.towers import png

torch = pytest.importorskip("torch", reason="the reference is a PyTorch model: pip install torch")

pytestmark = pytest.mark.slow

TOKENS = 16
PATCH, SQUARE = VISION["patch_size"], VISION["pooling_kernel_size"]
MOST = PICTURES["max_soft_tokens"] * SQUARE**2
"""Patches of a picture, at most."""


def model_at(path: Path) -> Any:
    config = json.loads((path / "config.json").read_text())
    rope = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}}
    vision, text = config["vision_config"] | rope, config["text_config"]
    ids = {name: config[name] for name in ("image_token_id", "boi_token_id", "eoi_token_id")}
    others = {"video_token_id": None, "audio_token_id": None}
    whole = transformers.Gemma4Config(text_config=text, vision_config=vision, **ids, **others)
    model = transformers.Gemma4ForConditionalGeneration(whole).float().eval()
    read: Any = mx.load(str(path / "model.safetensors"))
    weights = {name: torch.tensor(np.array(weight)) for name, weight in read.items()}
    wrong = model.load_state_dict(weights, strict=False)
    assert wrong.unexpected_keys == []
    assert set(wrong.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def patches_of(picture: Picture) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[MOST, PATCH * PATCH * 3]``, and the column and row of each patch, -1 for none."""
    rows, columns = picture.rows * SQUARE, picture.columns * SQUARE
    resized = pixels_of(picture.data).resize((columns * PATCH, rows * PATCH), resample=3)
    cells = (np.asarray(resized, np.float32) / 255).reshape(rows, PATCH, columns, PATCH, 3)
    pixels = np.zeros((MOST, 3 * PATCH**2), np.float32)
    places = np.full((MOST, 2), -1)
    pixels[: rows * columns] = cells.swapaxes(1, 2).reshape(rows * columns, -1)
    down, across = np.indices((rows, columns))
    places[: rows * columns] = np.stack([across, down], axis=-1).reshape(-1, 2)
    return pixels, places


def likeliest(model: Any, request: RowRequest, text: Sequence[int]) -> list[int]:
    ids = torch.tensor([[*request.prompt, *text[:-1]]])
    seen = {}
    if request.pictures:
        pixels, places = zip(*map(patches_of, request.pictures), strict=True)
        seen["pixel_values"] = torch.tensor(np.stack(pixels))
        seen["image_position_ids"] = torch.tensor(np.stack(places))
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).long(), **seen).logits
    found: list[int] = logits[0, -len(text) :].argmax(dim=-1).tolist()
    return found


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.mark.parametrize("sees", [None, "vision"], ids=["causal", "both ways"])
def test_texts_are_those_of_transformers(tmp_path: Path, sees: str | None) -> None:
    changes = {"use_bidirectional_attention": sees, "use_double_wide_mlp": True}
    gemma = Gemma.at(write_gemma(tmp_path, CLIPPED, **changes))
    parts: dict[str, list[list[int] | bytes]] = {
        "none": [words(40, 0)],
        "one": [words(9, 1), png(80, 90), words(7, 2)],
        "long": [png(10, 90), words(30, 3)],
        "two": [words(3, 4), png(80, 90, seed=3), words(2, 5), png(100, 30), words(2, 6)],
    }
    rows = {name: gemma.request(name, TOKENS, *some) for name, some in parts.items()}

    found = run(gemma.decoder(), list(rows.values()), chunk=40)

    model = model_at(tmp_path)
    assert found == {name: likeliest(model, rows[name], text) for name, text in found.items()}
