"""The decoder of ragged families: reads prompts in chunks, then rows join the batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.reading import Reading, read
from omlx_worker.engine.rows.row import Known, Row


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
        lookup: int = 0,
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

    @property
    def slow(self) -> Sequence[str]:
        return self._model.slow

    def add(self, row: Row) -> Known:
        reading = self._reading[row.row_id] = Reading(row, row.history)
        if not (self._prefixes and row.cache):
            return Known()
        unread = reading.history[:-1]
        held, layers = self._prefixes.take(unread, row.salt)
        if held:
            reading.take(self._model, held, layers)
        return Known(held, self._prefixes.shared(unread, row.salt))

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        readings = [self._reading[row_id] for row_id in tokens]
        counts = [min(tokens[r.row.row_id], r.left) for r in readings]
        if any(counts):
            read(self._model, readings, counts)
        for row_id in keep:
            self._keep(self._reading[row_id])
        finished = [reading for reading in readings if not reading.left]
        if finished:
            self.join([(reading.row, reading.layers) for reading in finished])
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
        if self._prefixes and (row := self._row_that_goes_on(row_id)):
            tokens, layers = self.text_so_far(row_id)
            self._prefixes.put(tokens, layers, row.salt)
        self.remove(row_id)

    def _row_that_goes_on(self, row_id: str) -> Row | None:
        index = self._slots.find(row_id)
        row = None if index is None else self._slots.at(index).row
        return row if row and row.cache and row.goes_on else None

    def _keep(self, reading: Reading) -> None:
        if self._prefixes and reading.row.cache and reading.done:
            tokens = reading.history[: reading.done]
            self._prefixes.put(tokens, reading.layers, reading.row.salt)
