"""The decoder of ragged families: reads prompts in chunks, then rows join the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_worker.engine.drafts.lookup import Lookup
from omlx_worker.engine.interface import Row
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch


@dataclass(slots=True)
class _Reading:
    """A row whose history is being read. The first step reads the last token."""

    row: Row
    history: list[int]
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.history) - 1 - self.done


class RaggedDecoder(Batch):
    """A `Decoder`: the ragged batch, and the rows whose prompts are being read for it."""

    reason = None

    def __init__(self, model: RaggedModel, depth: int = 0, lookup: Lookup | None = None) -> None:
        super().__init__(model, depth, lookup)
        self._reading: dict[str, _Reading] = {}

    def add(self, row: Row) -> None:
        self._reading[row.row_id] = _Reading(row, row.history, self._model.new_prompt_cache())

    def prefill(self, row_id: str, tokens: int) -> int:
        reading = self._reading[row_id]
        if reading.left > 0:
            history, done = reading.history, reading.done
            chunk = history[done : min(done + tokens, len(history) - 1)]
            following = history[done + 1 : done + 1 + len(chunk)]
            self._model.prefill(mx.array(chunk)[None], mx.array(following)[None], reading.caches)
            # Wait, so that the caller can time the chunk.
            mx.eval([cache.state for cache in reading.caches])
            reading.done += len(chunk)
        if reading.left == 0:
            del self._reading[row_id]
            prompt = self._model.prompt_arrays(reading.caches) if reading.done else []
            self.join(reading.row, prompt)
            return 0
        return reading.left

    def remove(self, row_id: str) -> None:
        if self._reading.pop(row_id, None) is None:
            self.leave(row_id)
