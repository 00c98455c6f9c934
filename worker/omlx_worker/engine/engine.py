"""The engine that the service drives: a decoder of tokens, and each row's text on top of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.protocol import (
    FinishReason,
    GenerationRequest,
    ModelInfo,
    TokenLogprob,
)
from omlx_worker.engine.interface import Emission, Row
from omlx_worker.engine.prompts import Prompter
from omlx_worker.engine.sampling import Sampled
from omlx_worker.engine.text import RowText, keep_first_space


class Decoder(Protocol):
    """Rows to tokens: the ragged batch, or mlx-lm's `BatchGenerator` for any other model."""

    def add(self, row: Row) -> None: ...

    def prefill(self, row_id: str, tokens: int) -> int: ...

    def step(self) -> list[Sampled]: ...

    def remove(self, row_id: str) -> None: ...


@dataclass(slots=True)
class _Gathered:
    """What one step added to one row so far."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class DecodingEngine:
    """An `omlx_worker.engine.interface.Engine` over a decoder."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: TokenizerWrapper,
        prompter: Prompter,
        info: ModelInfo,
        max_rows: int,
    ) -> None:
        keep_first_space(tokenizer)
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._prompter = prompter
        self._info = info
        self._max_rows = max_rows
        self._rows: dict[str, tuple[Row, RowText]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def max_rows(self) -> int:
        return self._max_rows

    def prepare(self, request: GenerationRequest, job_id: str) -> list[Row]:
        return self._prompter.rows(request, job_id)

    def add(self, row: Row) -> None:
        self._rows[row.row_id] = (row, RowText(row, self._tokenizer))
        self._decoder.add(row)

    def prefill(self, row_id: str, tokens: int) -> int:
        return self._decoder.prefill(row_id, tokens)

    def step(self) -> list[Emission]:
        gathered: dict[str, _Gathered] = {}
        for sampled in self._decoder.step():
            if sampled.row_id in self._rows:
                part = gathered.setdefault(sampled.row_id, _Gathered())
                self._gather(part, self._rows[sampled.row_id][1], sampled)
        return [self._emit(row_id, part) for row_id, part in gathered.items()]

    def remove(self, row_id: str) -> None:
        if self._rows.pop(row_id, None) is not None:
            self._decoder.remove(row_id)

    def _gather(self, part: _Gathered, text: RowText, sampled: Sampled) -> None:
        if part.finish_reason is not None:
            return
        piece = text.feed(sampled.token)
        part.text += piece.text
        part.finish_reason = piece.finish_reason
        if piece.keeps_token:
            part.tokens.append(sampled.token)
            if sampled.logprob is not None:
                part.logprobs.append(self._describe(sampled, sampled.logprob))

    def _emit(self, row_id: str, part: _Gathered) -> Emission:
        wants_logprobs = self._rows[row_id][0].sampling.top_logprobs is not None
        if part.finish_reason is not None:
            self.remove(row_id)
        logprobs = part.logprobs if wants_logprobs else None
        return Emission(row_id, part.tokens, part.text, logprobs, part.finish_reason)

    def _describe(self, sampled: Sampled, logprob: float) -> TokenLogprob:
        decode = self._tokenizer.decode
        return TokenLogprob(
            token=decode([sampled.token]),
            token_id=sampled.token,
            logprob=logprob,
            top=[(decode([token]), token, value) for token, value in sampled.top],
        )
