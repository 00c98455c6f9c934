"""Streams tokens as text: never half a character, never part of a stop string."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    TokenizerWrapper,
    _byte_decoder,
)

from omlx_producer.protocol import FinishReason
from omlx_worker.engine.interface import Row


class _FaithfulDetokenizer(BPEStreamingDetokenizer):
    """mlx-lm's byte-level detokenizer with two corrections.

    It keeps the first space of a completion, and it decodes byte 0. mlx-lm 0.32.2 does neither.
    """

    def _maybe_trim_space(self, current_text: str) -> str:
        return current_text

    def _decode_bytes(self, seq: str) -> str:
        byte_of = _byte_decoder()
        known = (bytes([byte_of[c]]) if c in byte_of else c.encode() for c in seq)
        return b"".join(known).decode("utf-8", "replace")


def decode_faithfully(tokenizer: TokenizerWrapper) -> None:
    """Make a byte-level tokenizer's detokenizers return a continuation's text unchanged."""
    if type(tokenizer._detokenizer) is BPEStreamingDetokenizer:
        tokenizer._detokenizer = _FaithfulDetokenizer(tokenizer)


@dataclass(frozen=True, slots=True)
class Piece:
    """The final text that one token released, and the reason if it ended the row."""

    text: str
    finish_reason: FinishReason | None = None
    keeps_token: bool = True


class RowText:
    """Follows one row: detokenizes, holds back what may become a stop string, ends the row.

    A stop string ends the row with the text before it. A stop token ends it and is not part of
    it. At the token limit all text that was held back is released, except half a character.
    """

    def __init__(self, row: Row, tokenizer: TokenizerWrapper) -> None:
        self._row = row
        self._tokens = 0
        self._detokenizer = tokenizer.detokenizer
        edges = [(text, None) for text in row.stop_strings]
        self._stops = TextStateMachine({"normal": edges}).make_state() if edges else None

    def feed(self, token: int) -> Piece:
        """Take the row's next token."""
        self._tokens += 1
        if token in self._row.stop_tokens:
            # A stop token may end a character or a stop string that was being held back.
            text, _ = self._release(self._drain_detokenizer(), final=True)
            return Piece(text, "stop", keeps_token=False)
        self._detokenizer.add_token(token)
        last = self._tokens == self._row.max_tokens
        fresh = self._drain_detokenizer() if last else self._detokenizer.last_segment
        text, stopped = self._release(fresh, final=last)
        if stopped:
            return Piece(text, "stop")
        return Piece(text, "length" if last else None)

    def _drain_detokenizer(self) -> str:
        self._detokenizer.finalize()
        # What is left of a character that never completed decodes to replacement characters.
        segment: str = self._detokenizer.last_segment
        return segment.rstrip("�")

    def _release(self, fresh: str, *, final: bool) -> tuple[str, bool]:
        if self._stops is None:
            return fresh, False
        self._stops, text, state = TextStateMachine.step(self._stops, fresh)
        if state is None:
            return text, True
        if final:
            self._stops, held, _ = TextStateMachine.flush(self._stops)
            text += held
        return text, False
