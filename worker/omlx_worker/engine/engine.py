"""The engine that the service drives: a decoder for tokens, and beside it the rows' texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import GenerationRequest, ModelInfo
from omlx_worker.engine.kernels.contest import HERE, Contest
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.footprint import budget, keep_within
from omlx_worker.engine.rows.emitting import EmittingRow, Texts
from omlx_worker.engine.rows.forms import told_of
from omlx_worker.engine.rows.interface import LONGEST_CHUNK, Size
from omlx_worker.engine.rows.row import Emission, Known, Row, RowStep, Said
from omlx_worker.engine.warm_up import WarmUp

log = logging.getLogger(__name__)


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
        head_hint: what would draft for a model of this family, and how; None for nothing more.
        contest: decides which kernels run.
        shapes: runs through those that rows may meet; None where rows are only read.
    """

    head: str | None = None
    head_hint: str | None = None
    contest: Contest = HERE
    shapes: WarmUp | None = None

    def __init__(
        self,
        family: str,
        decoder: RaggedDecoder,
        tokenizer: TokenizerWrapper,
        prepare: Callable[[GenerationRequest, str], list[Row]],
        info: ModelInfo,
        max_rows: int,
        draft_model: str | None = None,
        *,
        repeats: bool = False,
    ) -> None:
        self.family = family
        self.decoder = decoder
        self.prepare = prepare
        self._texts = Texts(tokenizer)
        self.answers = told_of(tokenizer)
        self.info = info
        self.max_rows = max_rows
        self.max_depth, self.own_depth = decoder.max_depth, decoder.own_depth
        drafter = f"draft model {draft_model}" if draft_model else "MTP head"
        drafters = [drafter] * (decoder.own_depth > 0) + ["lookup"] * decoder.looks_up
        self.drafters = ", ".join(drafters) or None
        self.shares, self.pads = decoder.shares, decoder.pads
        self.weight_bytes, self.memory_budget = decoder.weight_bytes, budget()
        self._repeats = repeats
        self._rows: dict[str, EmittingRow] = {}

    def text_of(self, row: Row) -> Said:
        return self._texts.said(row)

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

    @property
    def first_parts(self) -> int:
        return self.shapes.first_parts if self.shapes else 1

    def warm_up(self, *, first: bool = False) -> bool:
        return self.shapes is not None and self.shapes.next(first=first)

    def add(self, row: Row) -> Known:
        if self.shapes:
            self.shapes.stop()
        emitting = self._rows[row.row_id] = EmittingRow(row, self._texts, repeats=self._repeats)
        return Known() if emitting.is_over else self.decoder.add(emitting.decoded)

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        running = {name: count for name, count in tokens.items() if not self._rows[name].is_over}
        keep = [row_id for row_id in keep if row_id in running]
        left = self.decoder.prefill(running, keep) if running else {}
        return dict.fromkeys(tokens, 0) | left

    def reported(self) -> list[Emission]:
        reports = self.decoder.take_reports()
        emissions = [self._rows[row_id].read(each) for row_id, each in reports.items()]
        for emission in emissions:
            if emission.finish_reason is not None:
                del self._rows[emission.row_id]
        return emissions

    def limit_prefixes(self, room: int) -> None:
        self.decoder.limit_prefixes(room)

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        over = [row.end() for row in self._rows.values() if row.is_over]
        steps = [step for step in self.decoder.step(depths) if step.row_id in self._rows]
        if self.shapes:
            self.shapes.met(self.slots)
        new = [fresh for step in steps if (fresh := self._without_repeats(step))]
        emissions = over + [self._rows[step.row_id].stepped(step) for step in new]
        for emission in emissions:
            if emission.finish_reason is not None or emission.rejoins:
                del self._rows[emission.row_id]
                self.decoder.finish(emission.row_id)
        return emissions

    def _without_repeats(self, step: RowStep) -> RowStep | None:
        """What a step adds to the tokens that its row had when it was added; None for nothing."""
        row, tokens = self._rows[step.row_id], [sampled.token for sampled in step.tokens]
        if not row.again:
            return step
        count = min(len(row.again), len(tokens))
        same, row.again = tokens[:count] == row.again[:count], row.again[count:]
        if not same:
            log.warning(
                "row %s does not repeat its text here: it goes on from the text, which may round "
                "differently",
                step.row_id,
            )
            row.again = []
            self.decoder.remove(step.row_id)
            self.decoder.add(row.row)
            while self.decoder.prefill({step.row_id: LONGEST_CHUNK})[step.row_id]:
                pass
            return None
        fresh = step.tokens[count:]
        return replace(step, tokens=fresh) if fresh or step.cut else None

    def suspend(self, row_id: str) -> int | None:
        return self.decoder.suspend(row_id)

    def resume(self, row_id: str) -> None:
        self.decoder.resume(row_id)

    def keep_within(self, limit: int) -> None:
        keep_within(limit)
        self.decoder.keep_within(limit)
        if self.shapes:
            self.shapes.limit = limit

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:
        return self.decoder.bytes_for(rows, alone=alone)

    def miscounted_pages(self) -> int:
        return self.decoder.miscounted_pages()

    def remove(self, row_id: str) -> None:
        if self._rows.pop(row_id, None) is not None:
            self.decoder.remove(row_id)

    def close(self) -> None:
        if self.shapes:
            self.shapes.stop()
        del self.decoder
        self._rows.clear()
        end_streams()


def end_streams() -> None:
    """End this thread's streams: MLX aborts the process if a thread exits before their work is."""
    mx.synchronize()
    mx.clear_streams()
