"""Prompts that cannot fit cost next to nothing; those that can are the tokenizer's own."""

from __future__ import annotations

from typing import Any

import pytest

from omlx_producer.wire import GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.rows import encoding
from omlx_worker.engine.rows.encoding import Encoder
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.decoding import Loaded


class Counting:
    """The demo model's tokenizer, which counts the characters that it encodes."""

    def __init__(self) -> None:
        self.characters = 0
        self._tokenizer = Loaded.demo().tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        tokens: list[int] = self._tokenizer.encode(text, **options)
        return tokens


def info(context: int, longest: int = 76) -> ModelInfo:
    return ModelInfo(model="m", context_length=context, longest_token=longest, draft_depth=0)


def test_a_text_longer_than_the_context_of_longest_tokens_is_not_tokenized() -> None:
    counting: Any = Counting()

    with pytest.raises(InvalidRequest) as refused:
        Encoder(counting, info(4096)).encode("prompt", "a" * 8_000_000)

    assert counting.characters == 0
    assert str(refused.value) == (
        "prompt: 8000000 characters, which are at least 105264 tokens, do not fit the context of "
        "m, 4096 tokens with at least one generated; shorten it"
    )


def test_tokenizing_stops_where_the_context_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of a million characters, as vocabularies have for spaces, bounds nothing."""
    monkeypatch.setattr(encoding, "PIECE", 1000)
    counting: Any = Counting()

    with pytest.raises(InvalidRequest) as refused:
        Encoder(counting, info(4096, 10**6)).encode("prompt", "a" * 8_000_000)

    assert counting.characters == 5000
    assert str(refused.value) == (
        "prompt: 8000000 characters, of which the first 5000 are 5000 tokens, do not fit the "
        "context of m, 4096 tokens with at least one generated; shorten it"
    )


@pytest.mark.parametrize("text", [" " * 60_000, "def f(x):\n" * 2_000, "é" * 900])
def test_a_long_text_that_fits_is_encoded_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(encoding, "PIECE", 500)
    tokenizer = Loaded.demo().tokenizer
    whole = tokenizer.encode(text)

    assert Encoder(tokenizer, info(len(whole) + 1)).encode("prompt", text) == whole


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 400_000},
        {"messages": [{"role": "user", "content": "a" * 400_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 400_000}]}]},
    ],
)
def test_a_request_that_cannot_fit_is_refused_before_its_template_and_tokenizer(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    tokenizer = Loaded.demo().tokenizer
    prompter = Prompter(tokenizer, info(4096), 4096, Sampling())
    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(type(tokenizer), name, None, raising=False)

    with pytest.raises(InvalidRequest, match="400000 characters, which are at least 5264 tokens"):
        prompter.rows(GenerationRequest.parse({"model": "m", **fields}), "job")
