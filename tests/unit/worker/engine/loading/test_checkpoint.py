"""The files of a repository: what is downloaded when, and what is told meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from omlx_worker.engine.loading.checkpoint import resolve
from omlx_worker.engine.loading.identity import fingerprint_of
from omlx_worker.engine.loading.loader import describe
from tests.helpers.checkpoints import write_llama
from tests.helpers.hub import Hub

NAME = "makers/model"


def test_a_model_is_described_before_its_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = write_llama(tmp_path / "model")
    before = describe(NAME)
    assert hub.weights_served == []
    assert before.system_fingerprint is None, "it is a hash of the weights"
    path = resolve(NAME)
    assert hub.weights_served == ["model.safetensors"]
    fingerprint = fingerprint_of(path)
    assert describe(NAME) == before.model_copy(update={"system_fingerprint": fingerprint})


def test_a_download_tells_how_far_it_is(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = write_llama(tmp_path / "model")
    told: list[str] = []
    resolve(NAME, tell=told.append)
    shown = re.fullmatch(r"downloading, (.+) of (.+)", told[-1])
    assert shown
    assert shown[1] == shown[2]
    resolve(NAME, tell=lambda progress: told.append(f"again: {progress}"))
    assert not told[-1].startswith("again"), "nothing is left to download"


def test_markers_of_chats_are_the_added_tokens_that_the_template_names(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    special = ["<|channel|>", "<|reserved_1|>", "[/THINK]"]
    markup = ["<think>", "</think>", "</table>", "<channel|>"]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text) for text in [*markup, "word"]])
    tokenizer.chat_template = "<|channel|>word<think></think>[/THINK]<channel|><|not_added|>"
    tokenizer.save_pretrained(path)
    markers = describe(str(path)).markers
    assert sorted(markers) == ["</think>", "<channel|>", "<|channel|>", "[/THINK]"]
