"""Gemma 4's assistant drafts from what the model itself has kept of a row."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.loading.drafters import drafter_of, load_assistant
from omlx_worker.engine.loading.loader import decoder_of, load_engine
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.checkpoints import write_assistant, write_family, write_llama
from tests.helpers.decoding import Loaded, drafted, row, run
from tests.helpers.families import SLIDING

pytestmark = pytest.mark.usefixtures("small_buckets")

VOCABULARY = 264
ORDERED: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 3,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Its last two layers of four read what the two before have kept."""
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY)
    return Loaded.at(write_family(tmp_path_factory.mktemp("gemma"), "gemma4_text", **sizes))


@pytest.fixture(scope="module")
def assistant(gemma: Loaded, tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return loaded(gemma, tmp_path_factory.mktemp("assistant"))


def loaded(gemma: Loaded, path: Path, bits: int | None = None, **config: Any) -> nn.Module:
    return load_assistant(write_assistant(path, bits, VOCABULARY, **config))


def batch(gemma: Loaded, assistant: nn.Module, depth: int) -> RaggedDecoder:
    return decoder_of(gemma.network, 4, depth, partial(drafter_of, "assistant", assistant))


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(256), k=length)


def scores_of(net: Any, hidden: mx.array) -> np.ndarray:
    """The score of each token, -inf but for the best clusters."""
    embeddings = np.array(net.model.embed_tokens(mx.arange(net.args.vocab_size)))
    scores: np.ndarray = embeddings @ np.array(hidden)[0, 0]
    if "masked_embedding" in net:
        clusters = np.array(net.masked_embedding.centroids(hidden))[0, 0]
        ordering = np.array(net.masked_embedding.token_ordering).reshape(len(clusters), -1)
        for cluster in np.argsort(clusters)[: -net.best_clusters]:
            scores[ordering[cluster]] = -np.inf
    return scores


def drafts_of(gemma: Loaded, net: Any, history: list[int], depth: int) -> list[int]:
    """The greedy drafts after a text that one plain forward reads, without a window or a mask."""
    text, kinds = gemma.network.model, gemma.network.args.layer_types
    caches = make_prompt_cache(gemma.network)
    hidden = text(mx.array([history[:-1]]), cache=caches)[:, -1:]
    kept = {kind: (cache.keys, cache.values) for kind, cache in zip(kinds, caches, strict=False)}
    seen = {"sliding_attention": SLIDING, "full_attention": len(history) - 1}
    kept = {
        kind: tuple(part[:, :, : len(history) - 1][:, :, -seen[kind] :] for part in pair)
        for kind, pair in kept.items()
    }
    drafts = [history[-1]]
    for _ in range(depth):
        embedded = text.embed_tokens(mx.array([drafts[-1:]])) * text.embed_scale
        x = net.pre_projection(mx.concatenate([embedded, hidden], axis=-1))
        for layer in net.model.layers:
            x, *_ = layer(x, shared_kv=kept[layer.layer_type], offset=len(history) - 2)
        x = net.model.norm(x)
        drafts.append(int(scores_of(net, x).argmax()))
        hidden = net.post_projection(x)
    return drafts[1:]


@pytest.mark.parametrize(
    ("bits", "config"),
    [pytest.param(None, {}, marks=pytest.mark.slow), (4, ORDERED)],
    ids=["plain", "quantised, in clusters"],
)
def test_its_drafts_are_those_of_a_plain_forward_in_every_step(
    gemma: Loaded, tmp_path: Path, bits: int | None, config: dict[str, Any]
) -> None:
    net = loaded(gemma, tmp_path, bits, **config)
    prompts = {"x": prompt(5), "y": prompt(2 * SLIDING), "z": prompt(TAIL + 3)}
    for history, drafts in drafted(gemma, batch(gemma, net, 3), prompts, steps=10):
        assert drafts == drafts_of(gemma, net, history, 3), len(history)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_in_company_have_the_text_of_the_model_alone(
    gemma: Loaded, assistant: nn.Module, depth: int
) -> None:
    prompts = {str(n): prompt(n) for n in (1, 9, 40, TAIL + 3)}
    wanted = {name: gemma.greedy(tokens, 50) for name, tokens in prompts.items()}

    got = run(
        batch(gemma, assistant, depth),
        [row(name, tokens, 50) for name, tokens in prompts.items()],
        arrivals={"9": 5, "131": 12},
        departures={"40": 23},
    )

    assert got == {**wanted, "40": wanted["40"][:23]}


def test_tokens_outside_of_its_clusters_leave_a_distribution_whole(
    gemma: Loaded, tmp_path: Path
) -> None:
    net = loaded(gemma, tmp_path, **ORDERED)
    hot = Sampling(temperature=0.8, filters={"top_p": 0.9}, repetition_penalty=1.1, seed=3)
    cool = Sampling(temperature=0.5, seed=4)

    got = run(batch(gemma, net, 2), [row("x", prompt(9), 40, hot), row("y", [3], 40, cool)])

    alone = run(batch(gemma, net, 0), [row("x", prompt(9), 40, hot)])
    assert got["x"] == alone["x"]
    assert len(got["y"]) == 40


def test_a_row_keeps_nothing_more_for_it(gemma: Loaded, assistant: nn.Module) -> None:
    alone, beside = (batch(gemma, assistant, depth) for depth in (0, 2))

    assert beside.footprint.of_row == alone.footprint.of_row
    own = sum(value.nbytes for _, value in nn.utils.tree_flatten(assistant.parameters()))
    assert beside.weight_bytes == alone.weight_bytes + own


def published(path: Path) -> Path:
    """A checkpoint of the text model as one of the whole family is, its towers left out."""
    weights, config = mx.load(str(path / "model.safetensors")), path / "config.json"
    named = {f"language_model.{name}": value for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), named)
    whole = {"model_type": "gemma4", "text_config": json.loads(config.read_text())}
    config.write_text(json.dumps(whole | {"vocab_size": 257}))
    return path


def test_an_engine_takes_it_by_its_name(tmp_path: Path) -> None:
    model = str(published(write_family(tmp_path / "model", "gemma4_text")))
    draft = str(write_assistant(tmp_path / "draft", model_type="gemma4_unified_assistant"))

    engine = load_engine(model, max_rows=1, depth=2, drafter=draft)

    assert engine.info.draft_depth == 2
    assert engine.drafters == draft


def test_one_that_does_not_fit_is_one_sentence(tmp_path: Path, gemma: Loaded) -> None:
    def refused(model: Path, draft: Path) -> str:
        with pytest.raises(ModelError) as caught:
            load_engine(str(model), max_rows=1, depth=2, drafter=str(draft))
        return str(caught.value)

    model = write_family(tmp_path / "model", "gemma4_text")
    other, wide = write_llama(tmp_path / "other"), tmp_path / "wide"
    broken = write_assistant(tmp_path / "broken")
    fits = write_assistant(tmp_path / "fits")
    (broken / "model.safetensors").write_bytes(b"")

    assert refused(other, fits) == (
        f"--drafter {fits}: it cannot draft here, because it is an assistant of Gemma 4, and the "
        "model is of another family; give another"
    )
    assert "because its backbone_hidden_size is 96, and the model has 64; give another" in refused(
        model, write_assistant(wide, backbone_hidden_size=96)
    )
    assert refused(model, broken).startswith(f"--drafter {broken}: the assistant cannot be")
