"""Added tokens have one spelling in masks, forced runs and matchers: markup is no text."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable

import llguidance.numpy as bitmasks
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.lark import numbered
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.rows.text import bytes_of_tokens, decode_faithfully
from tests.helpers.constrained import constrained, grammars, play
from tests.helpers.decoding import GREEDY, Loaded

MARKUP = ["<think>", "[CALL]", "<|im_start|>"]
WORDS = ["foo_bar"]


def add(backend: PreTrainedTokenizerFast) -> None:
    backend.add_tokens([AddedToken(text, special=False) for text in [*MARKUP[:2], *WORDS]])
    backend.add_tokens([AddedToken(text, special=True) for text in MARKUP[2:]])


@functools.cache
def byte_level() -> TokenizerWrapper:
    tokenizer = copy.deepcopy(Loaded.demo().tokenizer)
    add(tokenizer._tokenizer)
    return faithful(TokenizerWrapper(tokenizer._tokenizer, BPEStreamingDetokenizer))


@functools.cache
def sentencepiece() -> TokenizerWrapper:
    """One whose own vocabulary and merges make the markup, as converted ones may."""
    pieces = ["<unk>", "</s>", "▁", "<", ">", "think", "a", "b", "<think", "<think>"]
    vocabulary = [*pieces, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("<", "think"), ("<think", ">")]
    model = models.BPE(
        {token: i for i, token in enumerate(vocabulary)},
        merges,
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    add(plain)
    return faithful(TokenizerWrapper(plain, SPMStreamingDetokenizer))


def faithful(tokenizer: TokenizerWrapper) -> TokenizerWrapper:
    decode_faithfully(tokenizer)
    return tokenizer


KINDS: dict[str, Callable[[], TokenizerWrapper]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
}


@functools.cache
def made(kind: str) -> Grammars:
    tokenizer = KINDS[kind]()
    return Grammars(tokenizer, len(tokenizer))


def allowed(matcher: LLMatcher, size: int) -> list[int]:
    mask = bitmasks.allocate_token_bitmask(1, size)
    bitmasks.fill_next_token_bitmask(matcher, mask, 0)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


TEXTS = st.lists(
    st.sampled_from([*MARKUP, *WORDS, "a", "b ", " ", "<", "think>", "é", "\\"]), max_size=5
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
@example(texts=["a<think>b"], data=None)
@example(texts=["a<think>b", "ad"], data=None)
@example(texts=["a[CALL]<|im_start|>"], data=None)
def test_what_a_mask_allows_and_what_is_forced_is_taken_by_the_matcher(
    kind: str, texts: list[str], data: st.DataObject | None
) -> None:
    grammar = made(kind).compile(Constraint("choice", json.dumps(texts)))
    matcher, written = grammar.start.deep_copy(), bytes_of_tokens(KINDS[kind]())
    text = b""
    while True:
        tokens = allowed(matcher, grammar.vocabulary)
        assert tokens
        taken = [token for token in tokens if matcher.validate_tokens([token])]
        assert {*tokens} - {*taken} <= grammar.ends
        forced = matcher.compute_ff_tokens()
        assert matcher.validate_tokens(forced) == len(forced)
        if data is None:  # as with drafts or without
            chosen = forced[:2] or [tokens[-1]]
        else:
            chosen = forced if forced and data.draw(st.booleans()) else []
            chosen = chosen or [data.draw(st.sampled_from(tokens))]
        if chosen[0] in grammar.ends:
            break
        assert matcher.try_consume_tokens(chosen) == len(chosen)
        text += b"".join(map(written, chosen))
    assert text.decode() in texts


@pytest.mark.parametrize(
    "sampling", [pytest.param(GREEDY, marks=pytest.mark.slow), Sampling(temperature=1.0, seed=3)]
)
def test_a_row_whose_text_spells_a_special_token_is_the_same_at_every_depth(
    sampling: Sampling,
) -> None:
    demo = Loaded.demo()
    schema = {"type": "object", "properties": {"a<|im_start|>b": {"const": "<|im_start|> c"}}}
    grammar = grammars().compile(
        Constraint("json_schema", json.dumps({**schema, "required": ["a<|im_start|>b"]}))
    )
    row = constrained("x", grammar, sampling)

    ended = [play(demo.decoder(depth), [row])["x"] for depth in (0, 3)]

    for end in ended:
        assert (end.reason, json.loads(end.text)) == ("stop", {"a<|im_start|>b": "<|im_start|> c"})


def test_a_grammar_names_tokens_outside_of_its_texts_patterns_and_comments_alone() -> None:
    names = {"<t>": 7}
    grammar = 'start: "<t>" <t> /<t>\\/<t>/ <u> // <t>\n  | "\\"<t>" <t># <t>\n%json {"a": "<t>"}'
    assert numbered(grammar, names) == (
        'start: "<t>" <[7]> /<t>\\/<t>/ <u> // <t>\n  | "\\"<t>" <[7]># <t>\n%json {"a": "<t>"}'
    )
