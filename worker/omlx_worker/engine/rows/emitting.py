"""Rows beside a decoder: their texts, and what each step adds to them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import (
    Alternative,
    FinishReason,
    InvalidRequest,
    PromptLogprob,
    TokenLogprob,
)
from omlx_worker.engine.rows.constraints import TOO_SLOW
from omlx_worker.engine.rows.row import Emission, Report, Row, RowStep, Said, Sampled, Scored
from omlx_worker.engine.rows.text import RowText, bytes_of_tokens, decode_faithfully

log = logging.getLogger(__name__)


class Texts:
    """The texts of one model's tokens. Any thread may call `said`."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        decode_faithfully(tokenizer)
        self.tokenizer = tokenizer
        self._bytes_of = bytes_of_tokens(tokenizer)

    def said(self, row: Row) -> Said:
        """The text that a row's ``generated`` tokens have made final."""
        text = RowText(row, self.tokenizer)
        said = "".join(text.feed(token).text for token in row.generated)
        return Said(said, text.marks)

    def fields(self, sampled: Sampled) -> dict[str, Any]:
        """The fields of a `TokenLogprob`."""
        text, part = self._spelling(sampled.token)
        return {
            "token": text,
            "token_id": sampled.token,
            "logprob": sampled.logprob or 0.0,
            "bytes": part,
            "top": [self._alternative(*each) for each in sampled.top],
        }

    def _alternative(self, token: int, logprob: float) -> Alternative:
        text, part = self._spelling(token)
        return (text, token, logprob) if part is None else (text, token, logprob, part)

    def _spelling(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, and its bytes if they hold part of a character."""
        data = self._bytes_of(token)
        text = data.decode(errors="backslashreplace")
        return text, None if text.encode() == data else list(data)


class EmittingRow:
    """A row that a decoder runs, and its text so far.

    Args:
        repeats: whether the decoder is to decode the tokens of an interrupted row again.

    Attributes:
        ended: why the tokens of an interrupted row had ended it already; None if they had not.
        again: its tokens that the decoder is still to decode again.
    """

    def __init__(self, row: Row, texts: Texts, *, repeats: bool = False) -> None:
        self._texts, self._text = texts, RowText(row, texts.tokenizer)
        self.ended: FinishReason | None = None
        read = 0 if repeats else len(row.generated)
        for count, token in enumerate(row.generated, 1):
            piece = self._text.feed(token)
            if piece.penalises:
                # These came without the penalty, so steps with it would not repeat them.
                read = max(read, count)
            if piece.finish_reason is not None:
                self.ended = piece.finish_reason
                break
        if self._text.penalty != row.sampling.repetition_penalty:
            penalised = replace(row.sampling, repetition_penalty=self._text.penalty)
            row = replace(row, sampling=penalised)
        self.row = row
        self.again = list(row.generated[read:])

    @property
    def is_over(self) -> bool:
        """Whether only its end is left to tell."""
        return self.ended is not None and self.row.prompt_logprobs is None

    @property
    def decoded(self) -> Row:
        """The row as the decoder takes it."""
        if self.ended is not None:
            return replace(self.row, generated=(), max_tokens=0)
        return replace(self.row, generated=self.row.generated[: -len(self.again) or None])

    def end(self) -> Emission:
        """The emission of a row that is over."""
        logprobs, thought = self._described([]), self._text.reasoning_tokens
        return Emission(self.row.row_id, [], "", logprobs, self.ended, reasoning_tokens=thought)

    def read(self, report: Report) -> Emission:
        """What reading its prompt gave, with which a row ends that decodes nothing."""
        row = self.row
        if isinstance(report, bytes):
            return Emission(row.row_id, [], "", finish_reason="stop", vector=report)
        reason = self.ended or (None if row.max_tokens else "length")
        whole = report if row.targets else [Scored(row.prompt[0], rank=0), *report]
        told = [replace(scored, top=scored.top[: row.prompt_logprobs]) for scored in whole]
        logprobs = [PromptLogprob(**self._texts.fields(each), rank=each.rank) for each in told]
        return Emission(row.row_id, [], "", finish_reason=reason, prompt_logprobs=logprobs)

    def stepped(self, step: RowStep) -> Emission:
        """What a step adds. The row ends or rejoins if the emission says so."""
        row, text = self.row, self._text
        pieces: list[str] = []
        marked = len(text.marks)
        tokens, told = list[int](), list[Sampled]()
        finish_reason, error, rejoins = None, None, False
        for sampled in step.tokens:
            piece = text.feed(sampled.token)
            pieces.append(piece.text)
            if piece.keeps_token:
                tokens.append(sampled.token)
            if piece.keeps_token or row.echo is not None:
                told.append(sampled)
            finish_reason, rejoins = piece.finish_reason, piece.penalises
            if finish_reason is not None or rejoins:
                break
        if step.cut and finish_reason is None and not rejoins:
            pieces.append(text.cut())
            finish_reason = "length"
            log.warning("row %s is cut: its constraint cannot be followed any further", row.row_id)
            slow = step.cut == "slow"
            error = InvalidRequest(row.grammar_field, *TOO_SLOW) if slow else None
        return Emission(
            row_id=row.row_id,
            tokens=tokens,
            text="".join(pieces),
            logprobs=self._described(told),
            marks=text.marks[marked:],
            reasoning_tokens=text.reasoning_tokens,
            rejoins=rejoins,
            finish_reason=finish_reason,
            drafted_text=sum(map(len, pieces[: step.accepted])),
            error=error,
            **step.draft_fields,
        )

    def _described(self, told: Sequence[Sampled]) -> list[TokenLogprob] | None:
        if self.row.sampling.top_logprobs is None:
            return None
        return [TokenLogprob(**self._texts.fields(sampled)) for sampled in told]
