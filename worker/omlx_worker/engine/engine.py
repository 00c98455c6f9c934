"""The engine that the service drives: a decoder for tokens, and the text of each row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import (
    Alternative,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    ModelInfo,
    PromptLogprob,
    TokenLogprob,
)
from omlx_worker.engine.generator import SerialDecoder
from omlx_worker.engine.kernels.contest import HERE, Contest
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.footprint import budget, keep_within
from omlx_worker.engine.rows.constraints import TOO_SLOW
from omlx_worker.engine.rows.interface import LONGEST_CHUNK, Size
from omlx_worker.engine.rows.row import Emission, Known, Row, RowStep, Said, Sampled, Scored
from omlx_worker.engine.rows.text import RowText, bytes_of_tokens, decode_faithfully
from omlx_worker.engine.warm_up import WarmUp

log = logging.getLogger(__name__)


Decoder = RaggedDecoder | SerialDecoder
"""Rows to tokens. What both have is as in `Engine`, but that their `step` returns tokens."""


class DecodingEngine:
    """An `omlx_worker.engine.rows.interface.Engine` over a decoder.

    Args:
        family: of the model, as mlx-lm names it.
        prepare: see `Engine`.
        draft_model: its name, if one drafts.
        repeats: whether the tokens of an interrupted row are decoded again rather than read,
            because fixed shapes round them so.

    Attributes:
        head: where the MTP head that drafts came from; None if none does.
        head_hint: how to get the one that the model's files lack; None if they lack none.
        contest: decides which kernels run.
        shapes: runs through those that rows may meet; None for mlx-lm's loop.
    """

    head: str | None = None
    head_hint: str | None = None
    contest: Contest = HERE
    shapes: WarmUp | None = None

    def __init__(
        self,
        family: str,
        decoder: Decoder,
        tokenizer: TokenizerWrapper,
        prepare: Callable[[GenerationRequest, str], list[Row]],
        info: ModelInfo,
        max_rows: int,
        draft_model: str | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        decode_faithfully(tokenizer)
        self.family = family
        self.decoder = decoder
        self.prepare = prepare
        self._tokenizer = tokenizer
        self._bytes_of = bytes_of_tokens(tokenizer)
        self.info = info
        self.max_rows = max_rows
        self.max_depth, self.own_depth = decoder.max_depth, decoder.own_depth
        drafter = f"draft model {draft_model}" if draft_model else "MTP head"
        drafters = [drafter] * (decoder.own_depth > 0) + ["lookup"] * decoder.looks_up
        self.drafters = ", ".join(drafters) or None
        self.shares, self.pads = decoder.shares, decoder.pads
        self.weight_bytes, self.memory_budget = decoder.weight_bytes, budget()
        self._repeats = repeats
        self._again: dict[str, list[int]] = {}
        self._rows: dict[str, tuple[Row, RowText]] = {}
        self._ended: dict[str, Emission] = {}
        # Of rows that an interrupted run has ended, but whose prompts it had scored.
        self._finish_reasons: dict[str, FinishReason] = {}

    def text_of(self, row: Row) -> Said:
        text = RowText(row, self._tokenizer)
        said = "".join(text.feed(token).text for token in row.generated)
        return Said(said, text.marks)

    @property
    def slots(self) -> int:
        return self.decoder.slots

    @property
    def traces(self) -> int:
        return self.decoder.traces

    @property
    def stalls(self) -> int:
        return self.decoder.stalls

    @property
    def contests(self) -> int:
        return self.contest.contests

    def warm_up(self, *, first: bool = False) -> bool:
        return self.shapes is not None and self.shapes.next(first=first)

    def add(self, row: Row) -> Known:
        if self.shapes:
            self.shapes.stop()
        text = RowText(row, self._tokenizer)
        read = 0 if self._repeats else len(row.generated)
        for count, token in enumerate(row.generated, 1):
            piece = text.feed(token)
            finish_reason = piece.finish_reason
            if piece.penalises:
                # These came without the penalty, so steps with it would not repeat them.
                read = max(read, count)
            if finish_reason is not None and row.prompt_logprobs is not None:
                self._rows[row.row_id] = (row, text)
                self._finish_reasons[row.row_id] = finish_reason
                return self.decoder.add(replace(row, generated=(), max_tokens=0))
            if finish_reason is not None:
                logprobs = self._describe(row, [])
                thought = text.reasoning_tokens
                self._ended[row.row_id] = Emission(
                    row.row_id, [], "", logprobs, finish_reason, reasoning_tokens=thought
                )
                return Known()
        if text.penalty != row.sampling.repetition_penalty:
            row = replace(row, sampling=replace(row.sampling, repetition_penalty=text.penalty))
        self._rows[row.row_id] = (row, text)
        if again := row.generated[read:]:
            self._again[row.row_id] = list(again)
        return self.decoder.add(replace(row, generated=row.generated[:read]))

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        running = {row_id: count for row_id, count in tokens.items() if row_id not in self._ended}
        keep = [row_id for row_id in keep if row_id in running]
        left = self.decoder.prefill(running, keep) if running else {}
        return dict.fromkeys(tokens, 0) | left

    def scored(self) -> list[Emission]:
        emissions = []
        for row_id, scores in self.decoder.take_scores().items():
            row, _ = self._rows[row_id]
            reason = self._finish_reasons.pop(row_id, None if row.max_tokens else "length")
            if reason is not None:
                del self._rows[row_id]
            told = self._describe_prompt(row, scores)
            emissions.append(Emission(row_id, [], "", finish_reason=reason, prompt_logprobs=told))
        return emissions

    def limit_prefixes(self, room: int) -> None:
        self.decoder.limit_prefixes(room)

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        ended = list(self._ended.values())
        self._ended.clear()
        steps = [step for step in self.decoder.step(depths) if step.row_id in self._rows]
        if self._again:
            steps = [new for step in steps if (new := self._without_repeats(step))]
        return ended + [self._emit(*self._rows[step.row_id], step) for step in steps]

    def _without_repeats(self, step: RowStep) -> RowStep | None:
        """What a step adds to the tokens that its row had when it was added; None for nothing."""
        row_id, tokens = step.row_id, [sampled.token for sampled in step.tokens]
        if not (again := self._again.pop(row_id, None)):
            return step
        count = min(len(again), len(tokens))
        if tokens[:count] != again[:count]:
            log.warning(
                "row %s does not repeat its text here: it goes on from the text, which may round "
                "differently",
                row_id,
            )
            row, _ = self._rows[row_id]
            self.decoder.remove(row_id)
            self.decoder.add(row)
            while self.decoder.prefill({row_id: LONGEST_CHUNK})[row_id]:
                pass
            return None
        if rest := again[count:]:
            self._again[row_id] = rest
        fresh = step.tokens[count:]
        return replace(step, tokens=fresh) if fresh or step.cut else None

    def suspend(self, row_id: str) -> bool:
        return row_id in self._rows and self.decoder.suspend(row_id)

    def resume(self, row_id: str) -> None:
        self.decoder.resume(row_id)

    def suspended_bytes(self, row_id: str) -> int:
        return self.decoder.suspended_bytes(row_id)

    def keep_within(self, limit: int) -> None:
        keep_within(limit)
        if self.shapes:
            self.shapes.limit = limit

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:
        return self.decoder.bytes_for(rows, alone=alone)

    def remove(self, row_id: str) -> None:
        self._ended.pop(row_id, None)
        self._finish_reasons.pop(row_id, None)
        self._again.pop(row_id, None)
        if self._rows.pop(row_id, None) is not None:
            self.decoder.remove(row_id)

    def wait(self) -> None:
        self.decoder.wait()

    def close(self) -> None:
        if self.shapes:
            self.shapes.stop()
        self.decoder.close()
        del self.decoder
        self._rows.clear()
        self._again.clear()
        self._ended.clear()
        self._finish_reasons.clear()
        end_streams()

    def _emit(self, row: Row, text: RowText, step: RowStep) -> Emission:
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
        if finish_reason is not None or rejoins:
            del self._rows[row.row_id]
            self._again.pop(row.row_id, None)
            self.decoder.finish(row.row_id)
        return Emission(
            row_id=row.row_id,
            tokens=tokens,
            text="".join(pieces),
            logprobs=self._describe(row, told),
            marks=text.marks[marked:],
            reasoning_tokens=text.reasoning_tokens,
            rejoins=rejoins,
            finish_reason=finish_reason,
            drafted_text=sum(map(len, pieces[: step.accepted])),
            error=error,
            **step.draft_fields,
        )

    def _describe(self, row: Row, told: list[Sampled]) -> list[TokenLogprob] | None:
        if row.sampling.top_logprobs is None:
            return None
        return [TokenLogprob(**self._fields(sampled)) for sampled in told]

    def _describe_prompt(self, row: Row, scores: list[Scored]) -> list[PromptLogprob]:
        whole = [Scored(row.prompt[0], rank=0), *scores]
        told = [replace(scored, top=scored.top[: row.prompt_logprobs]) for scored in whole]
        return [PromptLogprob(**self._fields(scored), rank=scored.rank) for scored in told]

    def _fields(self, sampled: Sampled) -> dict[str, Any]:
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


def end_streams() -> None:
    """End this thread's streams: MLX aborts the process if a thread exits before their work is."""
    mx.synchronize()
    mx.clear_streams()
