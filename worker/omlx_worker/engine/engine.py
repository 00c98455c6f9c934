"""The engine that the service drives: a decoder of tokens, and each row's text on top of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.protocol import GenerationRequest, ModelInfo, TokenLogprob
from omlx_worker.engine.interface import Emission, Row
from omlx_worker.engine.prompts import Prompter
from omlx_worker.engine.sampling import Sampled
from omlx_worker.engine.step import RowStep
from omlx_worker.engine.text import RowText, decode_faithfully


class Decoder(Protocol):
    """Rows to tokens: the ragged batch, or mlx-lm's `BatchGenerator` for any other model."""

    @property
    def depth(self) -> int: ...

    def add(self, row: Row) -> None: ...

    def prefill(self, row_id: str, tokens: int) -> int: ...

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]: ...

    def remove(self, row_id: str) -> None: ...


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
        decode_faithfully(tokenizer)
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

    @property
    def max_depth(self) -> int:
        return self._decoder.depth

    def prepare(self, request: GenerationRequest, job_id: str) -> list[Row]:
        return self._prompter.rows(request, job_id)

    def add(self, row: Row) -> None:
        self._rows[row.row_id] = (row, RowText(row, self._tokenizer))
        self._decoder.add(row)

    def prefill(self, row_id: str, tokens: int) -> int:
        return self._decoder.prefill(row_id, tokens)

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        return [
            self._emit(*self._rows[step.row_id], step)
            for step in self._decoder.step(depths)
            if step.row_id in self._rows
        ]

    def remove(self, row_id: str) -> None:
        if self._rows.pop(row_id, None) is not None:
            self._decoder.remove(row_id)

    def close(self) -> None:
        del self._decoder
        self._rows.clear()
        # MLX aborts the process if a thread's streams are still at work when it exits.
        mx.synchronize()
        mx.clear_streams()

    def _emit(self, row: Row, text: RowText, step: RowStep) -> Emission:
        pieces: list[str] = []
        kept: list[Sampled] = []
        finish_reason = None
        for sampled in step.tokens:
            piece = text.feed(sampled.token)
            pieces.append(piece.text)
            if piece.keeps_token:
                kept.append(sampled)
            finish_reason = piece.finish_reason
            if finish_reason is not None:
                self.remove(row.row_id)
                break
        return Emission(
            row_id=row.row_id,
            tokens=[sampled.token for sampled in kept],
            text="".join(pieces),
            logprobs=self._describe(row, kept),
            finish_reason=finish_reason,
            drafted=step.drafted,
            accepted=step.accepted,
        )

    def _describe(self, row: Row, kept: list[Sampled]) -> list[TokenLogprob] | None:
        if row.sampling.top_logprobs is None:
            return None
        decode = self._tokenizer.decode
        return [
            TokenLogprob(
                token=decode([sampled.token]),
                token_id=sampled.token,
                logprob=sampled.logprob or 0.0,
                top=[(decode([token]), token, logprob) for token, logprob in sampled.top],
            )
            for sampled in kept
        ]
