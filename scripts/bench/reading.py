"""Prompt reading of this engine and of mlx-lm: seconds from tokens to the first new token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row


@dataclass
class Reading:
    """Prompts that came together.

    Attributes:
        first: seconds until the first row's first token, and
        last: until every row has one; a lap each.
    """

    side: str
    rows: int
    length: int
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.length / statistics.median(self.last)

    def __str__(self) -> str:
        return (
            f"{self.rows} prompts of {self.length}: {self.side:15} first token after "
            f"{1000 * statistics.median(self.first):.1f} ms, every row's after "
            f"{1000 * statistics.median(self.last):.1f} ms, "
            f"{self.tokens_per_second:.0f} prompt tokens/s"
        )


def read_by_mlx_lm(network: nn.Module, prompts: Sequence[list[int]], laps: int) -> Reading:
    """By `BatchGenerator`, all prompts as one padded batch."""
    reading = Reading("BatchGenerator", len(prompts), len(prompts[0]))
    for number in range(laps + 1):
        generator = BatchGenerator(
            network,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
            prefill_step_size=LONGEST_CHUNK,
        )
        began = time.perf_counter()
        generator.insert([list(prompt) for prompt in prompts])
        waiting = len(prompts)
        times = []
        while waiting:
            waiting -= len(generator.next_generated())
            times.append(time.perf_counter() - began)
        generator.close()
        if number:
            reading.first.append(times[0])
            reading.last.append(times[-1])
    mx.synchronize()
    return reading


def read_by_ragged(network: nn.Module, prompts: Sequence[list[int]], laps: int) -> Reading:
    """By this engine, prompts of equal lengths, all in one forward a chunk."""
    model = as_ragged(network, drafts=False)
    decoder = RaggedDecoder(model)
    reading = Reading("ragged", len(prompts), len(prompts[0]))
    for number in range(laps + 1):
        began = time.perf_counter()
        rows = [
            Row(RowRequest(str(index), list(prompt), 1 << 20, Sampling(temperature=0.0)))
            for index, prompt in enumerate(prompts)
        ]
        for row in rows:
            decoder.add(row)
        seen: dict[str, float] = {}
        while left := [row for row in rows if row.left]:
            decoder.read(dict.fromkeys(left, LONGEST_CHUNK))
        while len(seen) < len(prompts):
            for step in decoder.step():
                seen.setdefault(step.row_id, time.perf_counter() - began)
        for row in rows:
            decoder.leave(row)
        if number:
            reading.first.append(min(seen.values()))
            reading.last.append(max(seen.values()))
    mx.synchronize()
    return reading
