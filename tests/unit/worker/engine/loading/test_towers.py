"""An engine has the tower of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.rows.interface import ModelError
from tests.helpers.checkpoints import write_qwen
from tests.helpers.towers import add_qwen_tower


def test_an_engine_weighs_the_tower_of_its_checkpoint_and_looks_with_it(tmp_path: Path) -> None:
    bare = load_engine(str(write_qwen(tmp_path / "qwen")), max_rows=1)

    seeing = load_engine(str(add_qwen_tower(tmp_path / "qwen")), max_rows=1, max_pixels=16 * 1024)

    looks = seeing.decoder._model.looks
    assert looks is not None
    assert looks.tower.grid(900, 900) == (4, 4)
    assert seeing.weight_bytes - bare.weight_bytes == looks.tower.weight_bytes > 0


def test_pixels_are_not_limited_without_a_tower(tmp_path: Path) -> None:
    path = write_qwen(tmp_path)

    with pytest.raises(ModelError) as refused:
        load_engine(str(path), max_rows=1, max_pixels=65_536)

    assert str(refused.value) == f"--max-pixels: leave it out, because {path} has no vision tower"
