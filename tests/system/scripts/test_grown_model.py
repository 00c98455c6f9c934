"""A grown demo model says what the demo model says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from omlx_worker.engine.loading.towers import read_tower
from scripts.grown_model.check import compare
from scripts.grown_model.grow import SIZES, add_tower, grow, save
from scripts.grown_model.layout import grouped, grown_layers, turned
from tests.helpers.decoding import Loaded
from tests.helpers.towers import drawn


@pytest.fixture(scope="module")
def grown_path(demo: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model at the smallest grown size, tokens added to its vocabulary."""
    path = tmp_path_factory.mktemp("grown")
    save(*grow(demo.network, demo.config, "tiny"), path)
    return path


def test_its_greedy_text_is_the_demo_models_and_so_are_the_drafts_it_accepts(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES["tiny"], "vocab_size", demo.network.language_model.args.vocab_size)
    grown, _ = grow(demo.network, demo.config, "tiny")
    grown.set_dtype(mx.float32)

    seen = compare(demo.network, grown, demo.tokenizer, prompts=2, tokens=32)

    assert seen.same == seen.tokens, seen
    assert seen.accepted[0] == seen.accepted[1], seen
    assert 0.3 < seen.accepted[0][-1] < 1, seen


def test_a_real_head_errs_as_often_as_a_large_models_and_the_text_is_the_same(
    demo: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES["tiny"], "vocab_size", demo.network.language_model.args.vocab_size)
    monkeypatch.setitem(SIZES["tiny"], "num_hidden_layers", 8)
    grown, _ = grow(demo.network, demo.config, "tiny", real_head=True)
    grown.set_dtype(mx.float32)

    seen = compare(demo.network, grown, demo.tokenizer, prompts=8, tokens=48)

    assert seen.same == seen.tokens, seen
    assert seen.accepted[1] == pytest.approx([0.86, 0.66, 0.51], abs=0.08), seen


def test_its_tower_gives_vectors_that_its_layers_take(grown_path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(grown_path, tmp_path / "sees")
    add_tower(path, "tiny")
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]

    tower = read_tower(path, config, None)

    assert tower is not None
    assert tower.see(drawn(320, 256)).shape == (10 * 8, text["hidden_size"])
    rotated = text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]
    assert sum(tower.sections) == rotated // 2


def test_tokens_that_were_added_are_never_chosen(demo: Loaded, grown_path: Path) -> None:
    grown = Loaded.at(grown_path)
    known = demo.network.language_model.args.vocab_size

    scores = grown.network(mx.array([[5, 60, 700, 9, 9]]))[0]

    assert scores.shape[-1] > known
    assert mx.all(scores[:, known:] < scores[:, :known].min(axis=-1, keepdims=True)).item()
    probabilities = mx.softmax(scores, axis=-1, precise=True)
    assert probabilities[:, known:].sum().item() < 1e-20


def test_mlx_lm_loads_it_and_generates_the_demo_models_text(
    demo: Loaded, grown_path: Path, heldout_prompts: list[str]
) -> None:
    network, config = load_model(grown_path)
    network.set_dtype(mx.float32)
    prompt = demo.tokenizer.encode(heldout_prompts[0])[-24:]

    by_mlx_lm = Loaded(network, demo.tokenizer, config).greedy(prompt, 24)

    assert by_mlx_lm == demo.greedy(prompt, 24)


@pytest.mark.parametrize(
    ("old", "new", "old_shared", "new_shared"), [(4, 16, 2, 4), (4, 32, 2, 16), (4, 16, 2, 16)]
)
def test_heads_go_on_sharing_what_they_shared(
    old: int, new: int, old_shared: int, new_shared: int
) -> None:
    heads, shared = grouped(old, new, old_shared, new_shared)

    assert sorted(head for head in heads.tolist() if head >= 0) == list(range(old))
    for place, head in enumerate(heads.tolist()):
        if head >= 0:
            assert shared[place // (new // new_shared)] == head // (old // old_shared)


def test_layers_keep_their_order_and_their_kind() -> None:
    sources = grown_layers(8, 32, 4)

    assert [source for source in sources if source >= 0] == list(range(8))
    assert all(place % 4 == source % 4 for place, source in enumerate(sources) if source >= 0)


@pytest.mark.parametrize(("old", "new"), [((64, 16), (256, 64)), ((64, 16), (128, 32))])
def test_a_head_that_rotates_more_elements_turns_the_old_ones_as_before(
    old: tuple[int, int], new: tuple[int, int]
) -> None:
    (old_dim, old_rotary), (new_dim, new_rotary) = old, new
    elements, used = turned(old_dim, new_dim, old_rotary, new_rotary)
    head = mx.random.normal((1, 1, 5, old_dim), key=mx.random.key(0))
    grown = mx.where(mx.array(used), head[..., mx.array(elements)], 0)

    def rotated(x: mx.array, dims: int) -> mx.array:
        return mx.fast.rope(x, dims, traditional=False, base=1e4, scale=1.0, offset=7)

    seen = rotated(grown, new_rotary)
    wanted = rotated(head, old_rotary)[..., mx.array(elements)]
    assert np.bincount(elements).tolist() == [new_dim // old_dim] * old_dim
    assert mx.allclose(
        seen[..., mx.array(np.flatnonzero(used))],
        wanted[..., mx.array(np.flatnonzero(used))],
        1e-5,
        1e-5,
    ).item()
    assert not mx.any(seen[..., mx.array(np.flatnonzero(~used))]).item()
