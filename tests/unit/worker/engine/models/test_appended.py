"""The layer that GLM-4.7-Flash's checkpoints append to the model drafts for it."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.loading.graft import Graft
from omlx_worker.engine.loading.loader import load, load_engine
from tests.helpers.checkpoints import convert_without_head, write_glm
from tests.helpers.decoding import Loaded, drafted, row, run

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def glm(original: Path) -> Loaded:
    return Loaded.at(original)


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(256), k=length)


def drafts_of(glm: Loaded, history: list[int], depth: int) -> list[int]:
    """The greedy drafts of mlx-lm's own layers after a text, with a plain cache."""
    model, cache = glm.network.model, KVCache()
    tokens = mx.array([history])
    hidden, following = model(tokens[:, :-1]), tokens[:, 1:]
    drafts: list[int] = []
    for _ in range(depth):
        hidden = glm.network.mtp(model.embed_tokens(following), hidden, [cache])[:, -1:]
        following = mx.argmax(glm.network.lm_head(hidden), axis=-1)
        drafts.append(int(following.item()))
    return drafts


def test_its_drafts_are_those_of_mlx_lms_own_layers_in_every_step(glm: Loaded) -> None:
    prompts = {"x": prompt(5), "y": prompt(TAIL + 3)}
    for history, drafts in drafted(glm, glm.decoder(2), prompts, steps=8):
        assert drafts == drafts_of(glm, history, 2), len(history)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_in_company_have_the_text_of_the_model_alone(glm: Loaded, depth: int) -> None:
    prompts = {str(n): prompt(n) for n in (1, 40, TAIL + 3)}
    wanted = {name: glm.greedy(tokens, 30) for name, tokens in prompts.items()}

    rows = [row(name, tokens, 30) for name, tokens in prompts.items()]
    got = run(glm.decoder(depth), rows, arrivals={"40": 5})

    assert got == wanted


@pytest.mark.parametrize("bits", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_copy_gets_it_from_the_original(
    original: Path, glm: Loaded, tmp_path: Path, bits: int | None
) -> None:
    copy = convert_without_head(original, tmp_path / "copy", bits)
    graft = Graft(str(original), tmp_path / "state")

    hint = load_engine(str(copy), max_rows=1, depth=1).head_hint
    network, *_ = load(copy, graft=graft)

    assert hint is not None
    assert hint.endswith("(ORIGINAL is the repository that the model was converted from)")
    got, wanted = (dict(tree_flatten(each.mtp.parameters())) for each in (network, glm.network))
    if bits:
        assert got["layers.0.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
        assert got["fc.weight"].dtype != mx.uint32
    else:
        assert got.keys() == wanted.keys()
        assert all(mx.array_equal(got[name], wanted[name]) for name in wanted)


def test_a_file_without_all_of_it_is_told(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = write_glm(tmp_path / "broken")
    weights = mx.load(str(broken / "model.safetensors"))
    del weights["model.layers.4.eh_proj.weight"]
    mx.save_safetensors(str(broken / "model.safetensors"), weights)

    assert load(broken)[0].mtp is None
    assert "head cannot be used (mtp.fc.weight is missing): no drafts" in caplog.text
