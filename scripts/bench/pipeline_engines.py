"""The engine in the benchmark's process, driven in two ways that know no Redis, thread or client.

``in process``: the worker's own scheduler says what is due, so that the engine does the same work
as in the worker. ``plain loop``: prompts are read whole, in turn, whatever rows wait meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from pipeline_lap import Lap, Watched

from omlx_producer.protocol import GenerationRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.decode.row import DecodeRow
from omlx_worker.engine.interface import Emission, Engine, Row

PREFILL_CHUNK = 2048


class PlainLoopSide:
    """The engine alone: every prompt read in its turn, with one step after each, then steps."""

    name = "plain loop"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def lap(self, requests: Sequence[GenerationRequest]) -> Lap:
        rows = _rows(self._engine, requests)
        return _timed(rows, self._emissions(rows))

    def _emissions(self, rows: Sequence[Row]) -> Iterator[list[Emission]]:
        for row in rows:
            self._engine.add(row)
            left = row.length
            while left:
                left = self._engine.prefill(row.row_id, min(left, PREFILL_CHUNK))
            yield self._engine.step()
        while True:
            yield self._engine.step()


class InProcessSide:
    """The engine under the worker's scheduler, in one thread."""

    name = "in process"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        budget = MemoryBudget(engine.memory_budget, engine.weight_bytes, engine.bytes_for)
        chunks = ChunkSize(PREFILL_CHUNK)
        self._loop = DecodeLoop(
            engine, budget, Counters(), driver=DepthDriver.fixed(engine.max_depth), chunks=chunks
        )

    def lap(self, requests: Sequence[GenerationRequest]) -> Lap:
        rows = _rows(self._engine, requests)
        return _timed(rows, self._emissions(rows))

    def _emissions(self, rows: Sequence[Row]) -> Iterator[list[Emission]]:
        self._loop.add([DecodeRow(row) for row in rows])
        while (emissions := self._loop.act()) is not None:
            yield emissions


def _rows(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Row]:
    return [engine.prepare(request, str(n))[0] for n, request in enumerate(requests)]


def _timed(rows: Sequence[Row], emissions: Iterator[list[Emission]]) -> Lap:
    """Run rows to their ends, noting when each row's tokens came out."""
    watched = {row.row_id: Watched() for row in rows}
    running = len(rows)
    computed, began = time.process_time(), time.perf_counter()
    while running:
        for emission in next(emissions):
            job, now = watched[emission.row_id], time.perf_counter() - began
            job.tokens += len(emission.tokens)
            if emission.tokens:
                job.arrivals.append(now)
            if emission.finish_reason:
                job.ended = now
                running -= 1
    return Lap.of(list(watched.values()), {"engine": time.process_time() - computed})
