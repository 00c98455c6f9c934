"""A Gemma 4 makes of pictures what mlx-vlm makes of them: vectors, and texts."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.rows.picture_file import pixels_of
from omlx_worker.engine.rows.row import Row
from tests.helpers import gemma_towers
from tests.helpers.decoding import enter, run
from tests.helpers.gemma_towers import BEGIN, CLIPPED, END, Gemma, write_gemma
from tests.helpers.towers import png

if find_spec("mlx_vlm") is None:  # imported here, it would patch transformers
    pytest.skip("mlx-vlm is the reference: pip install mlx-vlm", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = Path(gemma_towers.__file__).with_name("mlx_vlm_gemma.py")
PICTURES = [(80, 90), (30, 110), (1, 1), (300, 2), (500, 400), (3, 200)]
SIZES = [
    *((width, height) for width in range(1, 60) for height in range(1, 60)),
    *((random.Random(n).randint(1, 8000), random.Random(-n).randint(1, 8000)) for n in range(500)),
]
TOKENS = 24
# mlx-vlm lets the tokens of a picture see those after them in all layers, and beyond the edge of a
# sliding window. transformers does neither, so only these layers are alike.
BOTH_WAYS = {
    "use_bidirectional_attention": "vision",
    "layer_types": ["sliding_attention"] * 4,
    "sliding_window": 96,
}

# What the larger models have: no inputs of layers, no shared keys, and values that are keys.
LARGE = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


PROMPTS: dict[str, list[list[int] | int]] = {
    "none": [words(40, 0)],
    "before": [0, words(9, 1)],
    "between": [words(5, 2), 1, words(7, 3)],
    "other": [words(5, 2), 2, words(7, 3)],
    "two": [words(4, 4), 4, words(3, 5), 0, words(4, 6)],
}
"""Tokens, and numbers of pictures."""


class Pair(NamedTuple):
    """A model with its tower, and what mlx-vlm made with them."""

    gemma: Gemma
    theirs: dict[str, mx.array]

    @property
    def texts(self) -> dict[str, Any]:
        return {name: self.theirs[f"text.{n}"].tolist() for n, name in enumerate(PROMPTS)}


@pytest.fixture(
    scope="module",
    params=[({}, {}), (CLIPPED, LARGE), ({}, BOTH_WAYS)],
    ids=["causal", "large, clipped", "both ways"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    vision, text = request.param
    path = write_gemma(tmp_path_factory.mktemp("gemma"), vision, **text)
    files = [path / f"{n}.png" for n in range(len(PICTURES))]
    for n, file in enumerate(files):
        file.write_bytes(png(*PICTURES[n], seed=n))
    prompts = list[list[Any]]()
    for parts in PROMPTS.values():
        prompts.append([])
        for part in parts:
            prompts[-1] += [BEGIN, {"picture": part}, END] if isinstance(part, int) else part
    asked = {"sizes": SIZES, "prompts": prompts, "tokens": TOKENS}
    command = [sys.executable, SCRIPT, path, path / "made.safetensors", *files]
    subprocess.run(command, input=json.dumps(asked), text=True, check=True)
    made = mx.load(str(path / "made.safetensors"))
    assert isinstance(made, dict)
    return Pair(Gemma.at(path), made)


@pytest.mark.parametrize("n", range(len(PICTURES)), ids=str)
def test_vectors_are_mlx_vlms(pair: Pair, n: int) -> None:
    tower, wanted = pair.gemma.tower, np.array(pair.theirs[f"vectors.{n}"])

    vectors = np.array(tower.see(pixels_of(png(*PICTURES[n], seed=n))))

    assert vectors.shape == wanted.shape
    assert wanted.std() > 0.5, "weights so small that nothing matters"
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-4 * wanted.std())


def test_grids_are_mlx_vlms(pair: Pair) -> None:
    grids = pair.theirs["grids"].tolist()

    assert [list(pair.gemma.tower.grid(*size)) for size in SIZES] == grids


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("chunk", [5, 50, 512])
def test_rows_have_mlx_vlms_texts(pair: Pair, chunk: int, count: int) -> None:
    rows = [pair.gemma.request(name, TOKENS, *parts_of(name)) for name in PROMPTS]
    found = dict[str, list[int]]()
    for start in range(0, len(rows), count):
        found |= run(pair.gemma.decoder(), rows[start : start + count], chunk=chunk)

    assert found == pair.texts
    assert found["other"] != found["between"], "the text depends on no picture"


def test_what_is_kept_of_a_picture_gives_mlx_vlms_text(pair: Pair) -> None:
    decoder = pair.gemma.decoder(keeps=True)
    parts = parts_of("two")
    first, second = (
        Row(pair.gemma.request(name, TOKENS, *some, *rest))
        for name, some, rest in (("first", parts[:2], [words(3, 9)]), ("two", parts, []))
    )
    shared = first.request.pictures[0].end
    first.stops = {shared}
    decoder.leave(enter(decoder, first, chunk=shared))

    [found] = run(decoder, [second], chunk=512).values()

    assert (second.cached, found) == (shared, pair.texts["two"])


def parts_of(name: str) -> list[list[int] | bytes]:
    return [
        png(*PICTURES[part], seed=part) if isinstance(part, int) else part for part in PROMPTS[name]
    ]
