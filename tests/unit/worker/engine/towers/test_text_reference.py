"""A Qwen's texts after prompts with pictures are mlx-vlm's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.towers import read_tower
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.towers.tower import Tower
from tests.helpers import towers
from tests.helpers.checkpoints import write_qwen, write_qwen_vl
from tests.helpers.decoding import Loaded, run

if find_spec("mlx_vlm") is None:  # imported here, it would patch transformers
    pytest.skip("mlx-vlm is the reference: pip install mlx-vlm", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = Path(towers.__file__).with_name("mlx_vlm_greedy.py")
TOKENS = 12
START, IMAGE = towers.QWEN_TOKENS["vision_start_token_id"], towers.QWEN_TOKENS["image_token_id"]


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=count)


SIZES = [(96, 64), (64, 160), (200, 90), (64, 64), (64, 64)]
A, B, C, D, E = (towers.png(*size, seed=n) for n, size in enumerate(SIZES))
PROMPTS: dict[str, list[int | bytes]] = {
    "none": [*words(20, 0)],
    "before": [A, *words(9, 1)],
    "between": [*words(5, 2), B, *words(7, 3)],
    "after": [*words(5, 2), A, 7],
    "two": [*words(4, 4), C, *words(3, 5), A, *words(4, 6)],
    "other": [*words(5, 2), D, *words(7, 3)],
    "of its size": [*words(5, 2), E, *words(7, 3)],
    "five": [A, *words(2, 7), B, *words(2, 8), D, D, *words(2, 9), C, *words(6, 10)],
}


class Pair(NamedTuple):
    """A model with its tower, and mlx-vlm's texts."""

    loaded: Loaded
    tower: Tower
    texts: dict[str, list[int]]


@pytest.fixture(scope="module", params=["Qwen3.5", "Qwen3-VL"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = tmp_path_factory.mktemp("model")
    if request.param == "Qwen3.5":
        towers.add_qwen_tower(write_qwen(path))
    else:
        towers.add_qwen_tower(write_qwen_vl(path), deep=2)
    files = dict[bytes, str]()
    for data in (A, B, C, D, E):
        files[data] = str(path / f"{len(files)}.png")
        Path(files[data]).write_bytes(data)
    prompts = [
        [files[part] if isinstance(part, bytes) else part for part in prompt]
        for prompt in PROMPTS.values()
    ]
    command = [sys.executable, SCRIPT, path, str(TOKENS)]
    done = subprocess.run(
        command, input=json.dumps(prompts), text=True, check=True, stdout=subprocess.PIPE
    )
    loaded = Loaded.at(path)
    tower = read_tower(path, loaded.config, None)
    assert tower
    return Pair(loaded, tower, dict(zip(PROMPTS, json.loads(done.stdout), strict=True)))


def requests(tower: Tower) -> list[RowRequest]:
    rows = []
    for name, parts in PROMPTS.items():
        prompt, pictures = list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, bytes):
                prompt.append(START)
                grid = tower.grid(*Image.open(BytesIO(part)).size)
                pictures.append(Picture(len(prompt), *grid, part, spatial=True))
                prompt += [IMAGE] * pictures[-1].count
            else:
                prompt.append(part)
        rows.append(
            RowRequest(name, prompt, TOKENS, Sampling(temperature=0.0), pictures=tuple(pictures))
        )
    return rows


@pytest.mark.parametrize(("depth", "lookup"), [(0, 0), (2, 4)])
@pytest.mark.parametrize("chunk", [5, 512])
def test_rows_have_mlx_vlms_texts(pair: Pair, chunk: int, depth: int, lookup: int) -> None:
    model = as_ragged(pair.loaded.network, drafts=depth > 0, tower=pair.tower)

    found = run(RaggedDecoder(model, depth, lookup), requests(pair.tower), chunk=chunk)

    assert found == pair.texts
    assert pair.texts["other"] != pair.texts["of its size"], "the text depends on no picture"


def test_kept_beginnings_with_pictures_change_no_text(pair: Pair) -> None:
    model = as_ragged(pair.loaded.network, tower=pair.tower)
    decoder = RaggedDecoder(model, 2, 4, partial(PrefixCache, LayerSpecs.of(model), 1 << 30))
    for _ in range(2):
        rows = [Row(each) for each in requests(pair.tower)]
        for row in rows:
            row.stops = set(range(len(row.request.prompt)))  # kept after each chunk
        assert run(decoder, rows, chunk=7) == pair.texts
    assert [row.cached for row in rows] == [len(row.request.prompt) - 1 for row in rows]


def test_texts_go_on_after_each_of_their_tokens(pair: Pair) -> None:
    request = next(each for each in requests(pair.tower) if each.row_id == "two")
    text = pair.texts["two"]
    rows = [Row(replace(request, row_id=f"{n}"), generated=text[:n]) for n in range(TOKENS)]
    decoder = RaggedDecoder(as_ragged(pair.loaded.network, tower=pair.tower), 2, 4)

    found = run(decoder, rows, departures={f"{n}": TOKENS - n for n in range(TOKENS)})

    assert found == {f"{n}": text[n:] for n in range(TOKENS)}
