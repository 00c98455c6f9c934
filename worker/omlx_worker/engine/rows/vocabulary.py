"""A model's tokens as llguidance takes them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Set
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARKUP = re.compile(r"<.*>|\[\w+\]", re.DOTALL)

_HIDDEN = "\U0010ffff\U0010fffe"
"""Noncharacters, which no text begins a token's name with."""


def tokens_of(
    tokenizer: PreTrainedTokenizerBase,
    size: int,
    ends: Collection[int],
    slices: list[str] | None = None,
) -> LLTokenizer:
    """The tokens of a model; takes seconds for a large vocabulary.

    Those of `named_tokens` are no text, and a grammar names them by their ids. llguidance 1.9.1
    refuses them in texts, but spells forced text with them. So it gets them under other names.

    Args:
        size: entries of the model's logits, at least the tokenizer's tokens.
        ends: ids of end tokens.
        slices: see llguidance.

    Raises:
        ValueError: if llguidance cannot take the tokenizer.
    """
    from llguidance import LLTokenizer

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("only fast tokenizers can be")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    _hide(backend, named_tokens(tokenizer).keys())
    text = json.dumps(backend | {"padding": None, "truncation": None}, ensure_ascii=False)
    return LLTokenizer(text, n_vocab=size, eos_token=sorted(ends), slices=slices)


def named_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of added tokens that are no text, by their names: special ones and markup.

    llguidance itself takes them for none, except ``[THIS]`` where it is not special.
    """
    added = tokenizer.added_tokens_decoder.items()
    return {
        str(token.content): number
        for number, token in added
        if token.special or _MARKUP.fullmatch(token.content)
    }


def _hide(backend: dict[str, Any], names: Set[str]) -> None:
    """Rename tokens of a tokenizer, so that no text is theirs."""

    def hidden(name: str) -> str:
        return _HIDDEN + name if name in names else name

    for token in backend["added_tokens"]:
        if token["content"] in names:
            token["content"], token["special"] = hidden(token["content"]), True
    model = backend["model"]
    if isinstance(model["vocab"], dict):
        for name in names & model["vocab"].keys():
            model["vocab"][hidden(name)] = model["vocab"].pop(name)
    else:
        model["vocab"] = [[hidden(name), score] for name, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = hidden(model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes(pair, names)]


def _makes(pair: str | list[str], names: Set[str]) -> bool:
    """Whether a merge makes one of these tokens."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left + right in names or left in names or right in names
