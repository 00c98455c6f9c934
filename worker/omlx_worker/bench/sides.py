"""Sides of a benchmark: this engine's decoder at some depth, and mlx-lm's own generators.

No side stops at an end token, so each decodes the same number of rows throughout a lap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from omlx_worker.decode.clock import TRACED_STEPS, StepClock
from omlx_worker.decode.depth.policies import Mode
from omlx_worker.decode.depth_driver import DepthDriver, make_policy
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row, RowStep

FOREVER = 1 << 30
"""Token limit of a row; the end of a lap removes the row."""

BATCH_GENERATOR, STREAM = "BatchGenerator", "generate_step"
AUTO = "auto"

Step = list[tuple[int, int]]
"""Of each row that a step produced tokens for: drafts judged and drafts accepted."""

PLAIN = (0, 0)
"""A row in a step without drafts."""


class Side(Protocol):
    """Something that decodes."""

    name: str

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
        """A generator: reads the prompts, then yields steps. Closing it removes all rows."""
        ...


class DecoderSide:
    """This project's decoder, as deep as a mode of the worker drafts."""

    def __init__(self, decoder: RaggedDecoder, mode: Mode = "mtp", *, name: str = "") -> None:
        self.name = name or (AUTO if mode == AUTO else f"K={decoder.max_depth}")
        self._decoder = decoder
        self._driver = DepthDriver(make_policy(mode, decoder.max_depth, decoder.own_depth))

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
        rows = [
            Row(RowRequest(str(index), list(prompt), FOREVER, replace(sampling, seed=index)))
            for index, prompt in enumerate(prompts)
        ]
        try:
            for row in rows:
                self._decoder.enter(row)
            yield from self._steps(rows)
        finally:
            for row in rows:
                self._decoder.leave(row)
            mx.synchronize()

    def _steps(self, rows: list[Row]) -> Generator[Step]:
        decoder, driver, clock = self._decoder, self._driver, StepClock()
        waiting = set(rows)
        while True:
            stalls = decoder.traces + decoder.drains
            steps = decoder.step(driver.before(rows, decoder.slots))
            if decoder.traces + decoder.drains != stalls:
                clock.interrupt(TRACED_STEPS)
            driver.after([_as_emission(step) for step in steps], clock.step())
            if waiting:
                waiting -= {step.row for step in steps}
            else:
                yield [(step.drafted, step.accepted) for step in steps]


def _as_emission(step: RowStep) -> Emission:
    tokens = [sampled.token for sampled in step.tokens]
    return Emission(
        *(step.row_id, tokens, ""),
        drafted=step.drafted,
        accepted=step.accepted,
        step_depth=step.step_depth,
        source=step.source,
    )


class BatchGeneratorSide:
    """`mlx_lm.generate.BatchGenerator`."""

    name = BATCH_GENERATOR

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
        made = BatchGenerator(
            self._network,
            max_tokens=FOREVER,
            sampler=make_sampler(sampling.temperature),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        with closing(made) as generator:
            self._insert(generator, prompts)
            while len(generator.next_generated()) < len(prompts):
                pass
            while True:
                yield [PLAIN] * len(generator.next_generated())

    def _insert(self, generator: BatchGenerator, prompts: Sequence[list[int]]) -> None:
        generator.insert([list(prompt) for prompt in prompts])


class StreamSide:
    """`mlx_lm.generate.generate_step`, under `stream_generate`: one row."""

    name = STREAM

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def decode(self, prompts: Sequence[list[int]], sampling: Sampling) -> Generator[Step]:
        [prompt] = prompts
        stream = self._generate(prompt, make_sampler(sampling.temperature))
        next(stream)
        for _ in stream:
            yield [PLAIN]

    def _generate(self, prompt: list[int], sampler: Callable[[mx.array], mx.array]) -> Any:
        return generate_step(mx.array(prompt), self._network, max_tokens=FOREVER, sampler=sampler)
