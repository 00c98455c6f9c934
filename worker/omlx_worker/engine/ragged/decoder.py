"""The decoder of ragged families: reads prompts in chunks, then rows join the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import mlx.core as mx

from omlx_worker.engine.drafts.lookup import Lookup
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.row import Known, Row


class RaggedDecoder(Batch):
    """A `Decoder`: the ragged batch, and the rows whose prompts are being read for it.

    Args:
        prefixes: keeps beginnings of prompts for other rows; None to keep none.
    """

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

    def add(self, row: Row) -> Known:
        reading = Reading(row, row.history, self._model.new_prompt_cache())
        self._reading[row.row_id] = reading
        if not (self._prefixes and row.cache):
            return Known()
        unread = reading.history[:-1]
        reading.done = self._prefixes.take(unread, reading.caches)
        return Known(reading.done, self._prefixes.shared(unread))

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        readings = [self._reading[row_id] for row_id in tokens]
        counts = [min(tokens[r.row.row_id], r.left) for r in readings]
        if any(counts):
            read(self._model, readings, counts)
        for row_id in keep if self._prefixes else ():
            self._keep(self._reading[row_id])
        finished = [reading for reading in readings if not reading.left]
        if finished:
            self.join([(r.row, self._prompt_of(r)) for r in finished])
        for reading in finished:
            del self._reading[reading.row.row_id]
        return {reading.row.row_id: reading.left for reading in readings}

    def limit_prefixes(self, room: int) -> None:
        if self._prefixes:
            self._prefixes.limit_to(room)

    def close(self) -> None:
        if self._prefixes:
            self._prefixes.close()

    def remove(self, row_id: str) -> None:
        if self._reading.pop(row_id, None) is None:
            self.leave(row_id)

    def _keep(self, reading: Reading) -> None:
        if self._prefixes and reading.row.cache and reading.done:
            self._prefixes.put(reading.history[: reading.done], reading.caches)

    def _prompt_of(self, reading: Reading) -> list[list[mx.array]]:
        return self._model.prompt_arrays(reading.caches) if reading.done else []
