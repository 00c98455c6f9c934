"""Drive an engine that makes vectors the way the service does."""

from __future__ import annotations

import random

import numpy as np

from omlx_producer.wire import GenerationRequest
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.rows.row import BULK, Row

LENGTHS = (1, 3, 16, 17, 40, 64, 65, 100, 200, 255)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[str]:
    letters = random.Random(0)
    return ["".join(letters.choices("abcdefgh ", k=length)) for length in lengths]


class Embedding:
    """An engine, and how many windows of prompts it has read."""

    def __init__(self, engine: DecodingEngine) -> None:
        self.engine, self.counters = engine, Counters()

    def of(
        self, given: list[str] | list[list[int]], chunk: int = 2048, **fields: int
    ) -> np.ndarray:
        """The vectors ``[N, D]`` of a request's texts."""
        loop = DecodeLoop(
            self.engine,
            MemoryBudget(1 << 30, 0, self.engine.bytes_for),
            self.counters,
            driver=DepthDriver(FixedPolicy(0)),
            chunks=ChunkSize(chunk),
        )
        rows = self.engine.prepare(GenerationRequest(model="m", input=given, **fields), "j")
        loop.add([Row(row, BULK) for row in rows])
        found: dict[str, bytes | None] = {}
        while (emissions := loop.act()) is not None:
            found |= {each.row_id: each.vector for each in emissions}
        return np.array([np.frombuffer(found[row.row_id] or b"", np.float32) for row in rows])
