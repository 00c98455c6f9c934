"""The engine in the benchmark's process, without Redis, threads or clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import Engine
from omlx_worker.engine.rows.request import RowRequest
from scripts.bench.in_process import InProcess
from scripts.bench.pipeline.lap import Lap, Watched


class InProcessSide:
    """The engine under the worker's scheduler, in one thread."""

    name = "in process"

    def __init__(self, engine: Engine) -> None:
        self._engine = InProcess(engine)

    def lap(self, requests: Sequence[GenerationRequest]) -> Lap:
        rows = [self._engine.add(request, str(n)) for n, request in enumerate(requests)]
        return _timed(rows, self._emissions())

    def _emissions(self) -> Iterator[list[Emission]]:
        while True:
            yield self._engine.act()


def _timed(rows: Sequence[RowRequest], emissions: Iterator[list[Emission]]) -> Lap:
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
