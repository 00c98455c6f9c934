"""A Qwen's tower: sizes of pictures, their vectors, and a text model's forward with them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from PIL import Image

from omlx_worker.engine.loading.towers import read_sight, read_tower
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.towers.qwen3_vl import Qwen3VLTower
from omlx_worker.engine.towers.tower import Seen
from tests.helpers.towers import QWEN_PICTURES, add_qwen_tower, drawn, taken_by

CELL = 32
"""Pixels of a vector, each way."""


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def read(path: Path, max_pixels: int | None = None) -> Qwen3VLTower:
    tower = read_tower(path, config_of(path), max_pixels)
    assert isinstance(tower, Qwen3VLTower)
    return tower


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_qwen_tower(tmp_path_factory.mktemp("tower"), deep=2)


@pytest.fixture(scope="module")
def tower(path: Path) -> Qwen3VLTower:
    return read(path)


def seen_by(tower: Qwen3VLTower, picture: Image.Image) -> np.ndarray:
    return np.array(tower.see(picture))


def test_vectors_are_those_that_mlx_vlm_made_once(tower: Qwen3VLTower) -> None:
    vectors = seen_by(tower, drawn(120, 75))

    assert vectors.shape == (2 * 4, 3 * 64)
    assert vectors.sum() == pytest.approx(216.4815, abs=0.02)
    assert np.abs(vectors).sum() == pytest.approx(3710.668, abs=0.02)
    some = [-3.1367, 3.9452, 2.2017, -4.2612, -2.2509, 2.1235, -3.9723, 4.6993, 1.1179, -7.1887]
    assert vectors[::5, ::37].flatten()[:10].tolist() == pytest.approx(some, abs=2e-4)


def test_the_vectors_of_a_picture_depend_on_no_other(tower: Qwen3VLTower) -> None:
    alone = seen_by(tower, drawn(70, 100))

    seen_by(tower, drawn(100, 70, seed=1))

    assert np.array_equal(seen_by(tower, drawn(70, 100)), alone)


def test_a_vector_depends_on_where_each_patch_is(tower: Qwen3VLTower) -> None:
    picture = drawn(96, 64)
    moved = picture.copy()
    for here, there in (((0, 0), (16, 0)), ((16, 0), (0, 0))):
        moved.paste(picture.crop((*there, there[0] + 16, 16)), here)

    change = np.abs(seen_by(tower, moved) - seen_by(tower, picture)).max(axis=-1)

    assert change.min() > 0.01, "a patch that swaps places with its neighbour shows in each vector"


def test_patches_are_attended_to_in_parts_like_at_once(
    tower: Qwen3VLTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = seen_by(tower, drawn(96, 96))

    monkeypatch.setattr("omlx_worker.engine.towers.network._QUERIES", 7)

    np.testing.assert_allclose(seen_by(tower, drawn(96, 96)), whole, atol=1e-4)


@pytest.mark.parametrize("max_pixels", [None, 16 * CELL**2, CELL**2])
def test_grids_keep_the_limits_and_about_the_shape(path: Path, max_pixels: int | None) -> None:
    sight = read_sight(path, config_of(path), max_pixels)
    assert sight is not None
    most = max_pixels or QWEN_PICTURES["size"]["longest_edge"]
    for width, height in ((w, h) for w in range(1, 900, 37) for h in range(1, 900, 23)):
        if max(width, height) > 200 * min(width, height):
            continue
        rows, columns = sight.grid(width, height)
        assert 1 <= rows * columns <= sight.most
        if min(rows, columns) > 1:
            stretch = math.log(width / columns * rows / height)
            assert abs(stretch) < math.log(2)
        if min(rows, columns) > 3:
            assert rows * columns * CELL**2 <= most


def test_a_picture_that_fits_is_not_resized(tower: Qwen3VLTower) -> None:
    picture = drawn(3 * CELL, 2 * CELL)

    assert tower.grid(*picture.size) == (2, 3)
    first = np.array(tower.patches(picture))[0].reshape(3, 16, 16)
    pixels = np.asarray(picture, np.float32)[:16, :16].transpose(2, 0, 1) / 255
    mean, deviation = (
        np.array(QWEN_PICTURES[name])[:, None, None] for name in ("image_mean", "image_std")
    )
    np.testing.assert_allclose(first, (pixels - mean) / deviation, atol=1e-5)


def test_settings_of_newer_checkpoints_come_before_older_ones(path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    newer = {"image_processor": {"max_pixels": 16 * CELL**2, "min_pixels": CELL**2}}
    (tmp_path / "processor_config.json").write_text(json.dumps(newer))

    sight = read_sight(tmp_path, config_of(tmp_path), None)

    assert sight is not None
    assert sight.grid(900, 900) == (4, 4)
    assert sight.grid(10, 10) == (1, 1)


@pytest.mark.parametrize("bits", [None, 8])
def test_conversions_of_mlx_vlm_have_the_same_tower(
    path: Path, tmp_path: Path, bits: int | None
) -> None:
    raw: Any = mx.load(str(path / "model-tower.safetensors"))
    weights = {name.replace("model.visual.", "vision_tower."): raw[name] for name in raw}
    kernel = "vision_tower.patch_embed.proj.weight"
    weights[kernel] = weights[kernel].moveaxis(1, -1)
    if bits:
        matrices = [name for name in weights if name.endswith(("fc1.weight", "pos_embed.weight"))]
        for name in matrices:
            if weights[name].shape[-1] % 64 == 0:
                packed, scales, biases = mx.quantize(weights.pop(name), bits=bits)
                stem = name.removesuffix("weight")
                weights |= {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())

    ours, theirs = (seen_by(read(each), drawn(60, 60)) for each in (path, tmp_path))

    assert np.abs(ours - theirs).max() < (0.1 if bits else 1e-5) * ours.std()
    assert bits is None or read(tmp_path).weight_bytes < read(path).weight_bytes


def test_a_conversion_that_dropped_the_tower_has_none(path: Path, tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"lm_head.weight": mx.zeros((1, 1))})

    assert read_tower(tmp_path, config_of(path), None) is None


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"model_type": "llava", "vision_config": {"depth": 1}}]
)
def test_other_families_have_none(path: Path, config: dict[str, Any]) -> None:
    assert read_tower(path, config, None) is None
    assert read_sight(path, config, None) is None


def test_a_tower_that_lacks_a_tensor_is_refused_in_a_sentence(path: Path, tmp_path: Path) -> None:
    weights: Any = mx.load(str(path / "model-tower.safetensors"))
    weights.pop("model.visual.merger.norm.bias")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)

    with pytest.raises(ModelError) as refused:
        read_tower(tmp_path, config_of(path), None)

    said = f"--model {tmp_path}: its vision tower cannot be loaded: Missing 1 parameters"
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


class Text(nn.Module):
    """A text model whose layers double and add one, so that what is added where can be told."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(10, 64)
        self.layers = [lambda hidden, *_: 2 * hidden + 1] * 3

    def norm(self, hidden: mx.array) -> mx.array:
        return -hidden

    def __call__(
        self, tokens: mx.array, cache: Sequence[Any], input_embeddings: mx.array
    ) -> mx.array:
        for layer, view in zip(self.layers, cache, strict=True):
            input_embeddings = layer(input_embeddings, None, view)
        return self.norm(input_embeddings)


@pytest.mark.parametrize("deep", [0, 2])
def test_vectors_take_the_place_of_tokens_and_features_follow_the_first_layers(
    tmp_path: Path, deep: int
) -> None:
    tower, text = read(add_qwen_tower(tmp_path, deep)), Text()
    tokens = mx.array([[1, 2, 3], [4, 5, 6]])
    where = mx.array([[False, True, True], [False, False, True]])
    vectors = mx.where(where[..., None], mx.random.normal((2, 3, tower.width)), 0)
    views = [SimpleNamespace(make_mask=lambda _: None)] * 3

    found = tower.run(text, tokens, Seen(where, vectors), views)

    first, *features = mx.split(vectors, 1 + deep, axis=-1)
    hidden = mx.where(where[..., None], first, text.embed_tokens(tokens))
    for n in range(3):
        hidden = 2 * hidden + 1
        if n < deep:
            hidden = hidden + features[n]
    assert mx.array_equal(found, -hidden)


def test_room_is_about_what_seeing_takes(tower: Qwen3VLTower) -> None:
    taken = taken_by(tower, drawn(8 * CELL, 8 * CELL))
    assert tower.room(64) / 4 < taken < tower.room(64)
