"""Text comes out as it is final: no half characters, no part of a stop string."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from omlx_producer.wire import GenerationRequest, ModelInfo
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.text import RowText, bytes_of_tokens, decode_faithfully
from tests.helpers.chats import tokenizer_of
from tests.helpers.decoding import Loaded


@pytest.fixture(scope="module", autouse=True)
def _faithful(qwen: Loaded) -> None:
    decode_faithfully(qwen.tokenizer)


def follow(
    loaded: Loaded, tokens: list[int], stops: tuple[str, ...] = (), limit: int | None = None
) -> tuple[list[str], str | None, int]:
    """Feed tokens one by one; returns the pieces, the finish reason and the tokens used."""
    row = RowRequest(
        "r",
        [1],
        limit or len(tokens),
        Sampling(),
        stop_strings=stops,
        stop_tokens=frozenset(loaded.tokenizer.eos_token_ids),
    )
    text = RowText(row, loaded.tokenizer)
    pieces: list[str] = []
    for used, token in enumerate(tokens, 1):
        piece = text.feed(token)
        pieces.append(piece.text)
        if piece.finish_reason:
            return pieces, piece.finish_reason, used
    return pieces, None, len(tokens)


def composed(text: str) -> str:
    """Text as Qwen's tokenizer takes it: it normalises before it encodes."""
    return unicodedata.normalize("NFC", text)


@given(text=st.text(min_size=1, max_size=40).map(composed))
@example(text="\x00")
@example(text="the character �")
def test_pieces_add_up_to_the_text_and_hold_whole_characters(qwen: Loaded, text: str) -> None:
    tokens = qwen.tokenizer.encode(text, add_special_tokens=False)

    pieces, reason, _ = follow(qwen, tokens)

    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text
    assert reason == "length"


@given(
    text=st.text(alphabet="abé\n ", max_size=30),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_is_ever_let_out(
    qwen: Loaded, text: str, stops: list[str]
) -> None:
    tokens = qwen.tokenizer.encode(text + "|", add_special_tokens=False)
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]

    pieces, reason, _ = follow(qwen, tokens, tuple(stops))

    if not ends:
        assert ("".join(pieces), reason) == (text + "|", "length")
        return
    # The stop string that is complete first ends the text; the longest of several wins.
    end, negative_length = min(ends)
    assert reason == "stop"
    assert "".join(pieces) == text[: end + negative_length]
    for used in range(len(pieces)):
        assert text.startswith("".join(pieces[: used + 1]))


def test_a_completion_keeps_its_first_space(qwen: Loaded) -> None:
    tokens = qwen.tokenizer.encode(" x = 1", add_special_tokens=False)

    pieces, _, _ = follow(qwen, tokens)

    assert "".join(pieces) == " x = 1"


def test_a_stop_token_ends_the_row_and_releases_what_was_held_back(qwen: Loaded) -> None:
    [eos] = qwen.tokenizer.eos_token_ids
    tokens = [*qwen.tokenizer.encode("say en", add_special_tokens=False), eos, 65]

    pieces, reason, used = follow(qwen, tokens, ("end",))

    assert ("".join(pieces), reason, used) == ("say en", "stop", 7)


def test_half_a_character_at_the_token_limit_is_dropped(qwen: Loaded) -> None:
    tokens = qwen.tokenizer.encode("né", add_special_tokens=False)

    pieces, reason, _ = follow(qwen, tokens[:-1], limit=len(tokens) - 1)

    assert ("".join(pieces), reason) == ("n", "length")


def test_a_replacement_character_that_the_model_wrote_is_text_at_once(qwen: Loaded) -> None:
    tokens = qwen.tokenizer.encode("a�", add_special_tokens=False)
    [eos] = qwen.tokenizer.eos_token_ids

    assert follow(qwen, tokens)[0] == ["a", "", "", "�"]
    assert follow(qwen, [*tokens, eos])[0] == ["a", "", "", "�", ""]


WORDS = ["▁", "a", "�", "▁a", "▁▁", "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
SPACE, LETTER, REPLACEMENT, SPACE_LETTER, SPACES, LINE, BYTE = range(7)
DETOKENIZERS = {"known bytes": SPMStreamingDetokenizer, "together": NaiveStreamingDetokenizer}


@functools.cache
def sentencepiece(kind: str) -> TokenizerWrapper:
    """A tokenizer of `WORDS` whose decoder drops the space that begins a text."""
    merges = [("▁", "a"), ("▁", "▁")]
    model = models.BPE({token: i for i, token in enumerate(WORDS)}, merges, byte_fallback=True)
    backend = Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    plain = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer = TokenizerWrapper(plain, DETOKENIZERS[kind])
    decode_faithfully(tokenizer)
    return tokenizer


def sentencepiece_pieces(
    *tokens: int, kind: str = "known bytes", trims: bool = False
) -> Iterator[str]:
    text = RowText(RowRequest("r", [1], len(tokens), Sampling(), trims=trims), sentencepiece(kind))
    return (text.feed(token).text for token in tokens)


def sentencepiece_text(*tokens: int, trims: bool = False) -> str:
    return "".join(sentencepiece_pieces(*tokens, trims=trims))


def test_a_sentencepiece_tokenizer_keeps_that_character_and_drops_half_of_another() -> None:
    assert sentencepiece_text(LETTER, SPACE, REPLACEMENT) == "a �"
    assert sentencepiece_text(LETTER, *(BYTE + value for value in "é�".encode())) == "aé�"
    assert sentencepiece_text(LETTER, BYTE + "é".encode()[0]) == "a"


def test_a_token_past_a_sentencepiece_tokenizers_own_writes_nothing() -> None:
    assert sentencepiece_text(LETTER, BYTE + 256, LETTER) == "aa"


@pytest.mark.parametrize("kind", DETOKENIZERS)
@given(
    tokens=st.lists(
        st.sampled_from([SPACE, LETTER, SPACE_LETTER, SPACES, LINE, BYTE + 0x20, BYTE + 0x41]),
        min_size=1,
    )
)
@example(tokens=[SPACE_LETTER, LINE, SPACES, SPACE_LETTER])
@example(tokens=[SPACE, SPACE_LETTER])
def test_a_text_is_that_of_its_tokens_spaces_included(kind: str, tokens: list[int]) -> None:
    written = bytes_of_tokens(sentencepiece(kind))
    words = [chr(t - BYTE) if t >= BYTE else WORDS[t].replace("▁", " ") for t in tokens]

    pieces = list(sentencepiece_pieces(*tokens, kind=kind))
    answer = sentencepiece_pieces(*tokens, kind=kind, trims=True)

    assert "".join(answer) == "".join(words).removeprefix(" ")
    assert "".join(pieces) == "".join(words)
    assert [written(token).decode() for token in tokens] == words
    for used in range(len(pieces)):
        assert "".join(words[: used + 1]).startswith("".join(pieces[: used + 1]))


@pytest.mark.parametrize("kind", DETOKENIZERS)
def test_the_space_that_a_chats_template_leaves_out_is_no_part_of_the_answer(kind: str) -> None:
    def answer(*tokens: int) -> list[str]:
        return list(sentencepiece_pieces(*tokens, kind=kind, trims=True))

    assert answer(SPACE_LETTER, SPACE_LETTER) == ["a", " a"]
    assert answer(SPACES, SPACE_LETTER) == [" ", " a"]
    assert answer(SPACE, LETTER, SPACE_LETTER) == ["", "a", " a"]


def test_only_the_answer_of_a_free_chat_may_lose_a_space() -> None:
    tokenizer = tokenizer_of("")
    info = ModelInfo(model="m", context_length=512, longest_token=20)
    grammars = Grammars(tokenizer, len(tokenizer._tokenizer))
    prompter = Prompter(tokenizer, info, 257, Sampling(), grammars=grammars)
    chat = {"messages": [{"role": "user", "content": "x"}]}

    def trims(**fields: Any) -> bool:
        [row] = prompter.rows(GenerationRequest.parse({"model": "m", **fields}), "j")
        return row.trims

    assert trims(**chat)
    assert not trims(prompt="x")
    assert not trims(**chat, structured_outputs={"choice": [" a", "b"]})


def test_text_held_back_for_a_stop_string_comes_out_at_the_token_limit(qwen: Loaded) -> None:
    tokens = qwen.tokenizer.encode("ab", add_special_tokens=False)

    pieces, reason, _ = follow(qwen, tokens, ("abc",))

    assert (pieces, reason) == (["", "ab"], "length")
