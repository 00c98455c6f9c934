"""Loaded models compute what transformers' PyTorch models of the same checkpoints compute."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from omlx_worker.engine.kernels.window import Window, own_pages
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.loader import load_engine
from tests.helpers.checkpoints import EMBEDDING, write_embedding
from tests.helpers.decoding import Loaded, row, run
from tests.helpers.embedding import Embedding, texts

pytest.importorskip("torch", reason="references are PyTorch models: pip install torch")
from tests.unit.worker.engine.models.references import FAMILIES, Reference, build, reference_vector

pytestmark = pytest.mark.slow

TOLERANCE = 5e-4
"""Of logits that spread over several units, in float32."""


@pytest.fixture(scope="module", params=FAMILIES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    fused_head = request.param == "mixture with a vision tower"
    return build(request.param, tmp_path_factory.mktemp("reference"), fused_head=fused_head)


@pytest.fixture(scope="module")
def loaded(reference: Reference) -> Loaded:
    return Loaded.at(reference.path)


def tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def assert_close(ours: mx.array, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(ours), theirs, rtol=0, atol=TOLERANCE)


def test_the_backbones_logits_are_transformers_own(reference: Reference, loaded: Loaded) -> None:
    text = tokens(70)

    assert_close(loaded.network(mx.array([text]))[0], reference.logits(text))


def test_the_heads_logits_are_those_of_its_definition_one_and_two_deep(
    reference: Reference, loaded: Loaded
) -> None:
    text = tokens(70)
    ids = mx.array([text])
    model = as_ragged(loaded.network)
    caches = model.new_caches(1, 256)
    start = mx.array([0])

    window = Window.at(start, start, 69, own_pages(1, 4))
    hidden = model.forward(ids[:, :-1], caches, window, start)
    assert_close(model.logits(hidden)[0], reference.logits(text)[:-1])
    once = model.drafter.draft(ids[:, 1:], hidden, caches, window)
    assert_close(model.logits(once)[0], reference.drafts(text, 1))
    window = Window.at(start, start, 68, own_pages(1, 4))
    twice = model.drafter.draft(ids[:, 2:], once[:, :-1], model.new_caches(1, 256), window)
    assert_close(model.logits(twice)[0], reference.drafts(text, 2))


def test_the_ragged_batch_decodes_what_transformers_generates(
    reference: Reference, loaded: Loaded
) -> None:
    prompts = {str(length): tokens(length, seed=length) for length in (1, 40)}
    wanted = {name: reference.greedy(prompt, 24) for name, prompt in prompts.items()}

    got = run(loaded.decoder(depth=2), [row(name, prompt, 24) for name, prompt in prompts.items()])

    assert got == wanted


@pytest.mark.parametrize("family", EMBEDDING)
def test_vectors_are_those_of_transformers_and_the_modules_after_it(
    family: str, tmp_path: Path
) -> None:
    path = write_embedding(tmp_path, family)
    embedding = Embedding(load_engine(str(path), max_rows=8))

    wanted = [reference_vector(path, text) for text in texts()]
    np.testing.assert_allclose(embedding.of(texts(), chunk=32), wanted, rtol=0, atol=1e-6)
