"""A Qwen's tower makes of pictures what mlx-vlm makes of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.loading.towers import read_tower
from omlx_worker.engine.rows.picture_file import pixels_of
from omlx_worker.engine.towers.qwen3_vl import Qwen3VLTower
from tests.helpers import towers

if find_spec("mlx_vlm") is None:  # imported here, it would patch transformers
    pytest.skip("mlx-vlm is the reference: pip install mlx-vlm", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = Path(towers.__file__).with_name("mlx_vlm_qwen.py")
PICTURES = [(64, 64), (1, 1), (300, 40), (33, 250), (500, 400), (200, 1), (257, 129)]
SIZES = [
    *((width, height) for width in range(1, 60) for height in range(1, 60)),
    *((random.Random(n).randint(1, 8000), random.Random(-n).randint(1, 8000)) for n in range(500)),
]
ALLOWED = [(w, h) for w, h in SIZES if max(w, h) <= 200 * min(w, h)]


class Pair(NamedTuple):
    """A tower, and what mlx-vlm made with it."""

    tower: Qwen3VLTower
    theirs: dict[str, mx.array]


@pytest.fixture(scope="module", params=[0, 2], ids=["Qwen3.5", "Qwen3-VL"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("tower")
    towers.add_qwen_tower(path, request.param)
    files = [path / f"{n}.png" for n in range(len(PICTURES))]
    for n, file in enumerate(files):
        file.write_bytes(towers.png(*PICTURES[n], seed=n))
    command = [sys.executable, SCRIPT, path, path / "made.safetensors", *files]
    subprocess.run(command, input=json.dumps(ALLOWED), text=True, check=True)
    made = mx.load(str(path / "made.safetensors"))
    assert isinstance(made, dict)
    tower = read_tower(path, json.loads((path / "config.json").read_text()), None)
    assert isinstance(tower, Qwen3VLTower)
    return Pair(tower, made)


@pytest.mark.parametrize("n", range(len(PICTURES)), ids=str)
def test_pixels_and_vectors_are_mlx_vlms(pair: Pair, n: int) -> None:
    tower, theirs = pair
    picture = pixels_of(towers.png(*PICTURES[n], seed=n))

    patches, vectors = tower.patches(picture), tower.see(picture)

    # mlx-vlm repeats a picture as two frames; so does the tower, later.
    frames = np.array(theirs[f"pixels.{n}"]).reshape(len(patches), 3, 2, 256)
    assert np.array_equal(np.array(patches).reshape(-1, 3, 256), frames[:, :, 0])
    rows, columns = tower.grid(*picture.size)
    assert theirs[f"grid.{n}"].tolist() == [1, 2 * rows, 2 * columns]
    assert vectors.shape == (rows * columns, tower.width)
    wanted = np.array(theirs[f"vectors.{n}"])
    assert wanted.std() > 0.5, "weights so small that nothing matters"
    np.testing.assert_allclose(np.array(vectors), wanted, rtol=0, atol=1e-4 * wanted.std())


def test_grids_are_mlx_vlms(pair: Pair) -> None:
    grids = pair.theirs["grids"].tolist()

    assert [list(pair.tower.grid(*size)) for size in ALLOWED] == grids
    assert max(rows * columns for rows, columns in grids) <= pair.tower.most
