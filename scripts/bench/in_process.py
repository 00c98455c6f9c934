"""The worker's decode loop over an engine, in this process: no Redis, no threads, no clients."""

from __future__ import annotations

from omlx_producer.protocol import GenerationRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import PrefillPace
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.loop import Decoding
from omlx_worker.engine.interface import Emission, Engine, Row
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import ClaimedJob

PREFILL_CHUNK = 2048


class InProcess:
    """An engine under the worker's scheduler, at its own draft depth.

    Args:
        chunk: prompt tokens read at a time, at most.
    """

    def __init__(self, engine: Engine, chunk: int = PREFILL_CHUNK) -> None:
        self._engine = engine
        budget = MemoryBudget(engine.memory_budget, engine.weight_bytes, engine.bytes_for)
        pace = PrefillPace(chunk)
        self._loop = Decoding(engine, budget, Counters(), pacing=None, pace=pace)

    def add(self, request: GenerationRequest, name: str) -> Row:
        """Submit a request of one choice; returns its row."""
        rows = self._engine.prepare(request, name)
        claim = ClaimedJob(name, name, "omlx:m:default", 0.0, 0, b"", None, False)
        self._loop.add(ActiveJob(claim, request, rows, streams=True))
        return rows[0]

    def act(self) -> list[Emission]:
        """Read a chunk of a prompt or run a step; returns the tokens that came out of it."""
        return self._loop.act() or []
