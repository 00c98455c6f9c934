"""Streams tokens as text: never half a character, never part of a stop string."""

from __future__ import annotations

import codecs
import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)

from omlx_producer.wire import FinishReason
from omlx_worker.engine.rows.emission import Mark
from omlx_worker.engine.rows.repetition import Repetition
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.thinking import Thoughts

MOST_BYTES = 50_000
"""Tokens whose bytes are kept."""


class _Exact(StreamingDetokenizer):
    """The text of whole characters. The bytes of an incomplete one wait for the rest of it.

    mlx-lm 0.32.2 holds back any text that ends in U+FFFD, also where the model wrote that very
    character.
    """

    def reset(self) -> None:
        super().reset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self.text += self._trimmed(self._utf8.decode(self.bytes_of(token)))

    def finalize(self) -> None:
        """An incomplete character never becomes text."""

    @abstractmethod
    def bytes_of(self, token: int) -> bytes:
        """What a token writes, which may be part of a character."""

    def _trimmed(self, text: str) -> str:
        return text


class _ByteLevel(_Exact, BPEStreamingDetokenizer):
    """mlx-lm's byte-level detokenizer with two more corrections.

    It keeps the first space of a completion, and it decodes byte 0. mlx-lm 0.32.2 does neither.
    """

    def bytes_of(self, token: int) -> bytes:
        byte_of = _byte_decoder()
        # Models pad their vocabulary; mlx-lm writes such a token like this.
        written = self.tokenmap[token] if token < len(self.tokenmap) else "!"
        return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in written)


class _SentencePiece(_Exact, SPMStreamingDetokenizer):
    """mlx-lm's detokenizer. It drops one space at most, where mlx-lm drops all single ones."""

    def reset(self) -> None:
        super().reset()
        self._begun = False

    def bytes_of(self, token: int) -> bytes:
        # Of a token that pads the vocabulary, at which mlx-lm raises, nothing is written.
        written: bytes = self.tokenmap[token] if token < len(self.tokenmap) else b""
        return written.replace(self._sep, b" ")

    def _trimmed(self, text: str) -> str:
        first, self._begun = not self._begun, self._begun or bool(text)
        return text.removeprefix(" ") if self.trim_space and first else text


class _After:
    """Decodes tokens as what follows a letter. Decoders drop the space that begins a text."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer._tokenizer
        self.encode = self._tokenizer.encode
        self._letter = self.encode("a", add_special_tokens=False)
        self._written = len(self._tokenizer.decode(self._letter))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode([*self._letter, *tokens]))[self._written :]

    @property
    def drops_space(self) -> bool:
        """Whether the tokenizer itself drops the space that begins a text."""
        *_, last = self.encode("a a", add_special_tokens=False)
        return bool(self._tokenizer.decode([last]) == self.decode([last])[1:])


class _Together(NaiveStreamingDetokenizer):
    """mlx-lm's detokenizer of tokens without known bytes. It keeps the space before a line."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self.after = _After(tokenizer)
        self.trim_space = self.after.drops_space
        super().__init__(self.after)

    @property
    def text(self) -> str:
        text: str = super().text
        return text.removeprefix(" ") if self.trim_space else text


def decode_faithfully(tokenizer: TokenizerWrapper) -> None:
    """Make a tokenizer's detokenizers return a continuation's text unchanged.

    Where a decoder drops the space that begins a text, so does the detokenizer if its
    ``trim_space`` stays set.
    """
    given: Any = tokenizer._detokenizer
    if type(given) is BPEStreamingDetokenizer:
        tokenizer._detokenizer = _ByteLevel(tokenizer)
    elif type(given) is SPMStreamingDetokenizer:
        tokenizer._detokenizer = _SentencePiece(tokenizer, given.trim_space)
    elif type(given) is NaiveStreamingDetokenizer:
        tokenizer._detokenizer = _Together(tokenizer)


def bytes_of_tokens(tokenizer: TokenizerWrapper) -> Callable[[int], bytes]:
    """What single tokens write, parts of characters included if its detokenizer knows them."""
    detokenizer = tokenizer.detokenizer
    if isinstance(detokenizer, _Exact):
        return detokenizer.bytes_of
    decode = detokenizer.after.decode if isinstance(detokenizer, _Together) else tokenizer.decode
    return lambda token: decode([token]).encode()


def bytes_in_any_thread(tokenizer: TokenizerWrapper) -> Callable[[int], bytes]:
    """The same, from any thread, also while another encodes with the tokenizer."""
    decode_faithfully(tokenizer)
    if not isinstance(tokenizer.detokenizer, _Exact):
        tokenizer = copy.deepcopy(tokenizer)
    return lru_cache(MOST_BYTES)(bytes_of_tokens(tokenizer))


@dataclass(frozen=True, slots=True)
class Piece:
    """The final text that one token released, and the reason if it ended the row.

    Attributes:
        penalises: whether the row goes on with the penalty of texts that repeat themselves.
    """

    text: str
    finish_reason: FinishReason | None = None
    keeps_token: bool = True
    penalises: bool = False


class RowText:
    """Follows one row: detokenizes, holds back what may become a stop string, ends the row.

    A stop string ends the row with the text before it. A stop token ends it and is not part of
    it. At the token limit, and where the text repeats itself too often, all text that was held back
    is released, except half a character.

    Attributes:
        tokens: how many it has been fed.
        ended: why the row has ended; None while it goes on.
        marks: those of the tokens so far.
        penalty: the repetition penalty of the row's next token.
        unpenalised: how many of the tokens came without it.
    """

    def __init__(self, row: RowRequest, tokenizer: TokenizerWrapper) -> None:
        self._row = row
        self.tokens = self.unpenalised = 0
        self.ended: FinishReason | None = None
        self._detokenizer = tokenizer.detokenizer
        if not row.trims:
            self._detokenizer.trim_space = False
        edges = [(text, None) for text in row.stop_strings]
        self._stops = TextStateMachine({"normal": edges}).make_state() if edges else None
        thinking = row.sampling.thinking
        self._thoughts = Thoughts(thinking) if thinking else None
        self._repetition = Repetition(row.repetition) if row.repetition else None
        self._second_penalty = row.repetition.repetition_penalty if row.repetition else None
        self.penalty = row.sampling.repetition_penalty
        self._markers = row.reply.tokens if row.reply else {}
        self.marks: list[Mark] = []

    def feed(self, token: int) -> Piece:
        """Take the row's next token."""
        self.tokens += 1
        if token in self._row.stop_tokens:
            # A stop token may end a character or a stop string that was being held back.
            text, _ = self._release(self._drain_detokenizer(), final=True)
            self.ended = "stop"
            return Piece(text, "stop", keeps_token=False)
        if self._thoughts:
            self._thoughts.feed(token)
        self._detokenizer.add_token(token)
        if marker := self._markers.get(token):
            offset = self._detokenizer.text.rfind(marker)
            self.marks += [Mark(self.tokens - 1, offset)] if offset >= 0 else []
        end: FinishReason | None = None
        penalises = False
        if self._repetition and self._repetition.feed(token):
            penalises = self._penalise()
            end = None if penalises else "repetition"
        if self.tokens == self._row.max_tokens:
            end = "length"
        fresh = self._drain_detokenizer() if end else self._detokenizer.last_segment
        text, stopped = self._release(fresh, final=end is not None)
        self.ended = "stop" if stopped else end
        return Piece(text, self.ended, penalises=penalises and self.ended is None)

    def _penalise(self) -> bool:
        """Whether a text that repeats itself goes on, which it does once."""
        penalty, self._second_penalty = self._second_penalty, None
        if penalty is None or self._row.repetition is None:
            return False
        self.penalty, self._repetition = penalty, Repetition(self._row.repetition)
        self.unpenalised = self.tokens
        return True

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that are thinking."""
        return self._thoughts.tokens if self._thoughts else 0

    def cut(self) -> str:
        """The text that was held back, if the row ends before its token limit."""
        return self._release(self._drain_detokenizer(), final=True)[0]

    def _drain_detokenizer(self) -> str:
        self._detokenizer.finalize()
        segment: str = self._detokenizer.last_segment
        # From other detokenizers, an incomplete character is replacement characters.
        return segment if isinstance(self._detokenizer, _Exact) else segment.rstrip("�")

    def _release(self, fresh: str, *, final: bool) -> tuple[str, bool]:
        if self._stops is None:
            return fresh, False
        self._stops, text, state = TextStateMachine.step(self._stops, fresh)
        if state is None:
            return text, True
        if final:
            self._stops, rest, _ = TextStateMachine.flush(self._stops)
            text += rest
        return text, False
