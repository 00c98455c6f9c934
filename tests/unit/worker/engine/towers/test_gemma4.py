"""A Gemma 4's tower: sizes of pictures, their vectors, and what is made of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.loading.towers import read_sight, read_tower, tower_hint
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.towers.gemma4 import COUNTS, Gemma4Sight, Gemma4Tower
from tests.helpers.gemma_towers import (
    BEGIN,
    CLIPPED,
    END,
    IMAGE,
    PICTURES,
    config_with,
    tower_with,
    weights_of,
)
from tests.helpers.towers import drawn, taken_by

CELL = 8
"""Pixels of a vector, each way."""


def sight_of(processor: dict[str, Any] | None = None, max_pixels: int | None = None) -> Gemma4Sight:
    return Gemma4Sight(config_with({}), processor or {}, max_pixels)


WIDE = {
    "head_dim": 72,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pooling_kernel_size": 3,
}


@pytest.mark.parametrize(
    ("vision", "total", "some"),
    [
        ({}, 3205.13, [0.7534, -1.1742, -1.3955, 1.1912, 0.5648, 1.1975, -1.2094, 0.2229]),
        (CLIPPED, 3220.9436, [0.0093, -0.1633, -1.4634, 0.188, 0.491, 0.794, -0.6292, 1.8054]),
        (WIDE, 3203.8022, [0.1458, -0.1113, -0.4982, 0.8993, 0.2837, -0.3336, -0.1407, 0.9423]),
    ],
    ids=["plain", "clipped", "wide heads"],
)
def test_vectors_are_those_that_mlx_vlm_made_once(
    vision: dict[str, Any], total: float, some: list[float]
) -> None:
    vectors = np.array(tower_with(vision).see(drawn(100, 75)))

    assert vectors.shape == (7 * 9, 64)
    assert np.abs(vectors).sum() == pytest.approx(total, abs=0.02)
    assert vectors[::9, ::37].flatten()[:8].tolist() == pytest.approx(some, abs=2e-4)


def test_the_vectors_of_a_picture_depend_on_no_other() -> None:
    tower = tower_with({})
    alone = np.array(tower.see(drawn(70, 100)))

    mx.eval(tower.see(drawn(100, 70, seed=1)))

    assert np.array_equal(np.array(tower.see(drawn(70, 100))), alone)


@pytest.mark.parametrize(
    ("size", "grid"),
    [((10, 10), (16, 16)), ((4000, 3000), (14, 19)), ((1, 150), (204, 1)), ((5000, 25), (1, 236))],
)
def test_a_picture_becomes_as_large_as_it_may(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert sight_of().grid(*size) == grid


@pytest.mark.parametrize("most", COUNTS)
def test_no_picture_has_more_vectors_than_it_may(most: int) -> None:
    sight = sight_of({"max_soft_tokens": most})
    for width, height in ((w, h) for w in range(1, 900, 37) for h in range(1, 900, 23)):
        rows, columns = sight.grid(width, height)
        assert 1 <= rows * columns <= most
        if min(rows, columns) > 3:
            assert rows * columns > 0.6 * most


def test_a_checkpoint_tells_how_many_vectors_and_an_option_changes_that() -> None:
    assert sight_of().most == 280
    assert sight_of(PICTURES).most == 70
    assert sight_of(PICTURES, max_pixels=600 * CELL**2).most == 560
    with pytest.raises(ModelError, match=f"--max-pixels 900: .* {70 * CELL**2} pixels and more"):
        sight_of(max_pixels=900)


def test_prompts_have_its_tokens_around_a_picture() -> None:
    sight = sight_of()

    assert (sight.around, sight.token) == (((BEGIN,), (END,)), IMAGE)
    assert not sight.both_ways
    assert tower_with({}, use_bidirectional_attention="vision").both_ways


@pytest.mark.parametrize(("prefix", "bits"), [("model.", None), ("", None), ("", 8)])
def test_a_tower_is_read_from_checkpoints_and_conversions(
    tmp_path: Path, prefix: str, bits: int | None
) -> None:
    config = config_with({"hidden_size": 64})
    weights = weights_of(config)
    named = {f"{prefix}{name}": weight for name, weight in weights.items()}
    if bits:
        for name in [name for name in named if "proj" in name and "input" not in name]:
            packed, scales, biases = mx.quantize(named.pop(name), bits=bits)
            stem = name.removesuffix("weight")
            named |= {name: packed, f"{stem}scales": scales, f"{stem}biases": biases}
    named["language_model.model.norm.weight"] = mx.ones((64,))
    # Some files tell bounds that the configuration does not ask for.
    named[f"{prefix}vision_tower.encoder.layers.0.mlp.up_proj.input_max"] = mx.array(0.1)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), named)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PICTURES}))

    tower = read_tower(tmp_path, config, None)

    wanted = Gemma4Tower(config, PICTURES, None, weights)
    assert tower is not None
    assert (tower.weight_bytes < wanted.weight_bytes) == bool(bits)
    ours, theirs = (np.array(each.see(drawn(60, 60))) for each in (tower, wanted))
    assert np.abs(ours - theirs).max() < (0.3 if bits else 1e-5) * ours.std()


def test_a_tower_that_lacks_a_tensor_is_refused_in_a_sentence(tmp_path: Path) -> None:
    config = config_with({})
    weights = weights_of(config)
    del weights["embed_vision.embedding_projection.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)

    with pytest.raises(ModelError, match="its vision tower cannot be loaded: Missing 1 param"):
        read_tower(tmp_path, config, None)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4_unified"])
def test_relatives_with_other_towers_take_no_pictures(tmp_path: Path, family: str) -> None:
    config = config_with({}) | {"model_type": family}

    assert read_sight(tmp_path, config, None) is None
    assert read_tower(tmp_path, config, None) is None
    assert tower_hint(config, "m") == (
        f"pictures are not read by its family, {family}; use mlx_vlm.server for these, or one of "
        "qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, gemma4"
    )
    assert tower_hint(config | {"vision_config": None}, "m") is None


def test_room_is_about_what_seeing_takes() -> None:
    tower = tower_with({"head_dim": 64})
    taken = taken_by(tower, drawn(80, 56))
    assert tower.room(70) / 4 < taken < tower.room(70)
