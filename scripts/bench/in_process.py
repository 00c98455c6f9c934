"""The worker's decode loop over an engine, in this process: no Redis, no threads, no clients."""

from __future__ import annotations

from omlx_producer.wire import GenerationRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import LONGEST_CHUNK, Engine
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import DEFAULT, Row


class InProcess:
    """An engine under the worker's scheduler, at its own draft depth.

    Args:
        chunk: prompt tokens read at a time, at most.

    Attributes:
        counters: of the loop.
    """

    def __init__(self, engine: Engine, chunk: int = LONGEST_CHUNK) -> None:
        self._engine = engine
        engine.keep_within(engine.memory_budget)
        budget = MemoryBudget(engine.memory_budget, engine.weight_bytes, engine.bytes_for)
        chunks = ChunkSize(chunk)
        driver = DepthDriver(FixedPolicy(engine.max_depth))
        self.counters = Counters()
        self._loop = DecodeLoop(engine, budget, self.counters, driver=driver, chunks=chunks)

    def add(self, request: GenerationRequest, name: str, level: int = DEFAULT) -> RowRequest:
        """Submit a request of one choice; returns its row."""
        [row] = self._engine.prepare(request, name)
        self._loop.add([Row(row, level)])
        return row

    def warm_up(self) -> int:
        """Run through the list of shapes; returns how many were traced."""
        while self._engine.warm_up():
            pass
        return self._engine.delays.traces

    def act(self) -> list[Emission]:
        """Read a chunk of a prompt or run a step; returns the tokens that came out of it."""
        return self._loop.act() or []
