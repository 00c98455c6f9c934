"""The engine that the service drives: a decoder for tokens, and beside it the rows' texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import GenerationRequest, ModelInfo
from omlx_worker.engine.kernels.contest import HERE, Contest
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.footprint import budget, keep_within
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.emitting import Texts
from omlx_worker.engine.rows.interface import HEAD, LOOKUP, Delays
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row, Size
from omlx_worker.engine.warm_up import WarmUp


class DecodingEngine:
    """An `omlx_worker.engine.rows.interface.Engine` over a decoder.

    Args:
        family: of the model, as mlx-lm names it.
        prepare: see `Engine`.
        drafter: what drafts beside lookups, by its name in ``--drafter``.
        repeats: whether the tokens of an interrupted row are decoded again rather than read,
            because fixed shapes round them so.

    Attributes:
        head: where the MTP head that drafts came from; None if none does.
        head_hint: what would draft for a model of this family, and how; None for nothing more.
        tower_hint: what would look at pictures for it, and how; None if it does, or nothing would.
        contest: decides which kernels run.
        shapes: runs through those that rows may meet; None where rows are only read.
    """

    head: str | None = None
    head_hint: str | None = None
    tower_hint: str | None = None
    contest: Contest = HERE
    shapes: WarmUp | None = None

    def __init__(
        self,
        family: str,
        decoder: RaggedDecoder,
        tokenizer: TokenizerWrapper,
        prepare: Callable[[GenerationRequest, str], list[RowRequest]],
        info: ModelInfo,
        max_rows: int,
        drafter: str = HEAD,
        *,
        repeats: bool = False,
    ) -> None:
        self.family = family
        self.decoder = decoder
        self.prepare = prepare
        self._texts = Texts(tokenizer, repeats=repeats)
        self.answers = self._texts.answers
        self.info = info
        self.max_rows = max_rows
        self.max_depth, self.own_depth = decoder.max_depth, decoder.own_depth
        drafters = [drafter] * (decoder.own_depth > 0) + [LOOKUP] * decoder.looks_up
        self.drafters = ", ".join(drafters) or None
        self.shares, self.pads = decoder.shares, decoder.pads
        self.weight_bytes, self.memory_budget = decoder.weight_bytes, budget()
        self._over: list[Row] = []

    def text_of(self, row: Row) -> Said:
        return self._texts.said(row)

    @property
    def slots(self) -> int:
        return self.decoder.slots

    @property
    def delays(self) -> Delays:
        return Delays(self.decoder.traces, self.decoder.drains, self.contest.contests)

    @property
    def first_parts(self) -> int:
        return self.shapes.first_parts if self.shapes else 1

    def warm_up(self, *, first: bool = False) -> bool:
        return self.shapes is not None and self.shapes.next(first=first)

    def add(self, row: Row) -> int:
        if self.shapes:
            self.shapes.stop()
        self._texts.begin(row)
        if row.is_over:
            self._over.append(row)
            return 0
        return self.decoder.add(row)

    def read(self, tokens: Mapping[Row, int]) -> list[Emission]:
        running = {row: count for row, count in tokens.items() if not row.is_over}
        reports = self.decoder.read(running)
        if self.shapes:
            self.shapes.met(self.slots)
        return [self._texts.read(row, each) for row, each in reports.items()]

    def look(self, row: Row) -> None:
        self.decoder.look(row)

    def limit_prefixes(self, room: int) -> None:
        self.decoder.limit_prefixes(room)

    def step(self, depth: int | None = None) -> list[Emission]:
        over, self._over = self._over, []
        emissions = [self._texts.end(row) for row in over]
        for step in self.decoder.step(depth):
            emission = self._texts.stepped(step)
            emissions.append(emission)
            if emission.finish_reason is not None or emission.rejoins:
                self.decoder.finish(step.row)
            if emission.rejoins:
                self._texts.drop_unsaid(step.row)
        return emissions

    def suspend(self, row: Row) -> None:
        self.decoder.suspend(row)

    def resume(self, row: Row) -> None:
        self.decoder.resume(row)

    def keep_within(self, limit: int) -> None:
        keep_within(limit)
        self.decoder.keep_within(limit)
        if self.shapes:
            self.shapes.limit = limit

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:
        return self.decoder.bytes_for(rows, alone=alone)

    def miscounted_pages(self) -> int:
        return self.decoder.miscounted_pages()

    def remove(self, row: Row) -> None:
        self._over = [other for other in self._over if other is not row]
        self.decoder.leave(row)

    def close(self) -> None:
        if self.shapes:
            self.shapes.stop()
        del self.decoder
        end_streams()


def end_streams() -> None:
    """End this thread's streams: MLX aborts the process if a thread exits before their work is."""
    mx.synchronize()
    mx.clear_streams()
