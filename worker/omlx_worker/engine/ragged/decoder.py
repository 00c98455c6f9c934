"""The decoder of ragged families: reads prompts in chunks, then rows join the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx

from omlx_worker.engine.drafts.lookup import LEAD, Lookup
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import fill_from_slot
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.row import Known, Row


class RaggedDecoder(Batch):
    """A `Decoder`: the ragged batch, and the rows whose prompts are being read for it.

    Args:
        prefixes: keeps beginnings of prompts for other rows; None to keep none.
    """

    name = "ragged batch"
    reason = None

    def __init__(
        self,
        model: RaggedModel,
        depth: int = 0,
        lookup: Lookup | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        super().__init__(model, depth, lookup)
        self._prefixes = prefixes
        self._reading: dict[str, Reading] = {}

    @property
    def shares(self) -> bool:
        return self._prefixes is not None

    @property
    def vocabulary(self) -> int:
        """Entries of the logits."""
        return self._model.vocabulary

    @property
    def pads(self) -> bool:
        return self._model.pads

    def add(self, row: Row) -> Known:
        reading = Reading(row, row.history, self._model.new_prompt_cache())
        self._reading[row.row_id] = reading
        if not (self._prefixes and row.cache):
            return Known()
        unread = reading.history[:-1]
        reading.done = self._prefixes.take(unread, reading.caches, row.salt)
        return Known(reading.done, self._prefixes.shared(unread, row.salt))

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        readings = [self._reading[row_id] for row_id in tokens]
        counts = [min(tokens[r.row.row_id], r.left) for r in readings]
        if any(counts):
            read(self._model, readings, counts)
        for row_id in keep:
            self._keep(self._reading[row_id])
        finished = [reading for reading in readings if not reading.left]
        if finished:
            self.join([(r.row, self._prompt_of(r)) for r in finished])
        for reading in finished:
            del self._reading[reading.row.row_id]
        # The last token of a history, which the row's first step reads, is left too.
        return {r.row.row_id: r.left + 1 if r.left else 0 for r in readings}

    def limit_prefixes(self, room: int) -> None:
        if self._prefixes:
            self._prefixes.limit_to(room)

    def close(self) -> None:
        if self._prefixes:
            self._prefixes.close()

    def remove(self, row_id: str) -> None:
        # A row whose joining failed may be in both.
        self._reading.pop(row_id, None)
        self.leave(row_id)

    def finish(self, row_id: str) -> None:
        if self._prefixes and (kept := self._text_so_far(row_id)):
            self._prefixes.put(*kept)
        self.remove(row_id)

    def _text_so_far(self, row_id: str) -> tuple[list[int], list[Any], str | None] | None:
        """The tokens of a row that may go on, caches with all of them, its salt; None if unknown.

        The step in flight has read the last of them, whose samples nobody wants any more.
        """
        index = self._slots.find(row_id)
        slot = None if index is None else self._slots.at(index)
        if index is None or slot is None or not (slot.row.cache and slot.row.goes_on):
            return None
        state = self._buffers.state
        if "history" not in state or not self._width_in_flight(slot):
            return None
        self._slots.drain()
        length = self._committed(slot) + 1
        tokens: list[int] = state["history"][index, LEAD : LEAD + length].tolist()  # type: ignore[assignment]
        layers = self._buffers.beginning(index, slot.body_length, length)
        caches = self._model.new_prompt_cache()
        fill_from_slot(caches, layers, length)
        return tokens, caches, slot.row.salt

    def _keep(self, reading: Reading) -> None:
        if self._prefixes and reading.row.cache and reading.done:
            tokens = reading.history[: reading.done]
            self._prefixes.put(tokens, reading.caches, reading.row.salt)

    def _prompt_of(self, reading: Reading) -> list[list[mx.array]]:
        return self._model.prompt_arrays(reading.caches) if reading.done else []
