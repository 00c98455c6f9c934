"""The MTP head has read every committed token, whatever depth the steps have."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.cache_driver import Driver
from tests.helpers.decoding import Loaded, drafted, enter, row


@pytest.mark.slow
def test_the_head_reads_on_without_drafts_through_folds_joins_and_suspensions(
    qwen: Loaded,
) -> None:
    driver = Driver(qwen, seed=3, tokens=2 * TAIL + 100)
    for length in (1, 12, 270):
        driver.join(length, None)
    driver.step(1.0, 3, 2)
    driver.step(0.0, TAIL, 0)
    driver.join(40, None)
    driver.step(0.0, 20, 0)
    driver.suspend(1)
    driver.step(0.0, 20, 0)
    driver.resume(1)
    driver.step(0.0, 20, 0)
    driver.check()
    driver.step(0.0, TAIL, 0)
    driver.check()
    driver.step(1.0, 5, 3)
    driver.check()

    assert driver.checked == 4 + 4 + 4


def test_the_first_drafts_after_plain_steps_are_those_of_a_batch_that_always_drafts(
    qwen: Loaded,
) -> None:
    prompt = [1, 2, 3, 4, 5]
    always, seldom = joined(qwen, prompt, depth=2), joined(qwen, prompt, depth=2)
    for _ in range(12):
        # One token a step: its drafts are all wrong.
        if "drafts" in always.state:
            drafts = always.state["drafts"]
            always.state["drafts"] = mx.full(drafts.shape, 256, mx.int32)
        always.step()
        seldom.step(0)
    always.step()
    seldom.step(2)

    wanted, got = (decoder.state["drafts"] for decoder in (always, seldom))
    assert got.tolist() == wanted.tolist()


def drafts_of_mlx_lm(loaded: Loaded, history: list[int], depth: int) -> list[int]:
    """The greedy drafts of mlx-lm's own layers after a text, with a plain cache."""
    model, head = loaded.network.language_model, loaded.network.mtp
    caches = [KVCache() for _ in head.layers]
    tokens = mx.array([history])
    hidden, following = model.model(tokens[:, :-1]), tokens[:, 1:]
    drafts: list[int] = []
    for _ in range(depth):
        hidden = head(model.model.embed_tokens(following), hidden, caches)[:, -1:]
        following = mx.argmax(model.model.embed_tokens.as_linear(hidden), axis=-1)
        drafts.append(int(following.item()))
    return drafts


def test_each_draft_reads_the_one_before_it_at_the_next_position(qwen: Loaded) -> None:
    prompts = {"x": [1, 2, 3, 4, 5], "y": list(range(30, 60))}
    for history, drafts in drafted(qwen, qwen.decoder(3), prompts, steps=4):
        assert drafts == drafts_of_mlx_lm(qwen, history, 3), len(history)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="products are counted on the CPU")
def test_a_step_without_drafts_computes_only_the_heads_keys_and_values(
    qwen: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, may_draft = (joined(qwen, [1, 2, 3], depth) for depth in (0, 2))
    submit, graphs = mx.async_eval, []

    def watched(*arrays: Any) -> None:
        mx.export_to_dot(str(tmp_path / "step.dot"), *flat(arrays))
        graphs.append((tmp_path / "step.dot").read_text())
        submit(*arrays)

    for decoder in (plain, may_draft):
        for _ in range(3):
            decoder.step(0)
        monkeypatch.setattr(mx, "async_eval", watched)
        decoder.step(0)
        monkeypatch.setattr(mx, "async_eval", submit)

    without, beside = (Counter(re.findall(r'\[label ="([^"]+)"', graph)) for graph in graphs)
    # The product that mixes embedding and hidden state, then queries, keys and values as one.
    assert beside["Matmul"] == without["Matmul"] + 2
    assert beside["Softmax"] == without["Softmax"]


def joined(loaded: Loaded, prompt: list[int], depth: int) -> RaggedDecoder:
    decoder = loaded.decoder(depth)
    enter(decoder, row("x", prompt, 400))
    return decoder


def flat(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [array for part in parts for array in flat(part)]
