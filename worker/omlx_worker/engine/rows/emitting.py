"""Turns the tokens of steps and windows into the text and the scores that consumers get."""

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
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.forms import told_of
from omlx_worker.engine.rows.row import Report, Row, RowStep, Sampled, Scored
from omlx_worker.engine.rows.text import RowText, bytes_of_tokens, decode_faithfully

log = logging.getLogger(__name__)


class Texts:
    """The texts of one model's rows, and what each step adds to them. Any thread may call `said`.

    Args:
        repeats: whether steps decode the tokens of an interrupted row again.

    Attributes:
        answers: what is known of the parts of its answers, in words.
    """

    def __init__(self, tokenizer: TokenizerWrapper, *, repeats: bool = False) -> None:
        decode_faithfully(tokenizer)
        self.answers = told_of(tokenizer)
        self._repeats = repeats
        self.tokenizer = tokenizer
        self._bytes_of = bytes_of_tokens(tokenizer)

    def said(self, row: Row) -> Said:
        """The text that a row's tokens have made final. It goes on from there."""
        text = row.said = RowText(row.request, self.tokenizer)
        pieces: list[str] = []
        for token in row.text_tokens():
            pieces.append(text.feed(token).text)
            if text.ended:
                break
        return Said("".join(pieces), text.marks)

    def begin(self, row: Row) -> None:
        """Let a row go on from the text of its tokens."""
        if row.said is None:
            self.said(row)
        assert row.said
        if row.said.penalty != row.sampling.repetition_penalty:
            row.sampling = replace(row.sampling, repetition_penalty=row.said.penalty)
        row.again = 0
        if row.said.ended:
            row.again = row.produced
        elif self._repeats:
            # Steps with the penalty would not repeat what came without it.
            row.again = row.produced - row.said.unpenalised

    def end(self, row: Row) -> Emission:
        """The emission of a row that is over."""
        assert row.said
        logprobs, thought = self._described(row, []), row.said.reasoning_tokens
        return Emission(row.row_id, [], "", logprobs, row.said.ended, reasoning_tokens=thought)

    def read(self, row: Row, report: Report) -> Emission:
        """What reading its prompt gave, with which a row ends that decodes nothing."""
        asked, said = row.request, row.said
        assert said
        if isinstance(report, bytes):
            return Emission(row.row_id, [], "", finish_reason="stop", vector=report)
        reason: FinishReason | None = said.ended or (None if asked.max_tokens else "length")
        whole = report if asked.targets else [Scored(asked.prompt[0], rank=0), *report]
        told = [replace(scored, top=scored.top[: asked.prompt_logprobs]) for scored in whole]
        logprobs = [PromptLogprob(**self.fields(each), rank=each.rank) for each in told]
        return Emission(
            *(row.row_id, [], ""),
            finish_reason=reason,
            reasoning_tokens=said.reasoning_tokens,
            prompt_logprobs=logprobs,
        )

    def stepped(self, step: RowStep) -> Emission:
        """What a step adds. The row ends or rejoins if the emission says so."""
        row = step.row
        text, asked = row.said, row.request
        assert text
        pieces: list[str] = []
        marked = len(text.marks)
        tokens, told = list[int](), list[Sampled]()
        rejoins = False
        for sampled in step.tokens:
            piece = text.feed(sampled.token)
            pieces.append(piece.text)
            if piece.keeps_token:
                tokens.append(sampled.token)
            if piece.keeps_token or asked.echo is not None:
                told.append(sampled)
            rejoins = piece.penalises
            if text.ended or rejoins:
                break
        finish_reason, error, accepted = text.ended, None, step.accepted
        if step.cut and finish_reason is None and not rejoins:
            pieces.append(text.cut())
            finish_reason = "length"
            log.warning("row %s is cut: its constraint cannot be followed any further", row.row_id)
            slow = step.cut == "slow"
            error = InvalidRequest(asked.grammar_field, *TOO_SLOW) if slow else None
        return Emission(
            row_id=row.row_id,
            tokens=tokens,
            text="".join(pieces),
            logprobs=self._described(row, told),
            marks=text.marks[marked:],
            reasoning_tokens=text.reasoning_tokens,
            rejoins=rejoins,
            finish_reason=finish_reason,
            drafted=step.drafted,
            accepted=accepted,
            drafted_text=sum(map(len, pieces[:accepted])),
            step_depth=step.step_depth,
            source=step.source,
            error=error,
        )

    def drop_unsaid(self, row: Row) -> None:
        """Drop the tokens of a row that rejoins after the one that its text ends with."""
        assert row.said
        del row.tokens[len(row.request.prompt) + row.said.tokens :]

    def _described(self, row: Row, told: Sequence[Sampled]) -> list[TokenLogprob] | None:
        if row.sampling.top_logprobs is None:
            return None
        return [TokenLogprob(**self.fields(sampled)) for sampled in told]

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
