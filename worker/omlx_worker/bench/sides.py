"""What is measured: this engine's decoder at some depth, and mlx-lm's own generators.

All are driven alike: prompts in, then steps. None stops at an end token, so that a side decodes
the same number of rows throughout. Greedy, so that all of them say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step

from omlx_worker.decode.clock import StepClock
from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.depth.fixed import AutoPolicy
from omlx_worker.engine.engine import Decoder
from omlx_worker.engine.interface import Emission, Row, Sampling
from omlx_worker.engine.ragged.step import RowStep

FOREVER = 1 << 30
"""Tokens that a row may come to: a lap ends it."""

BATCH_GENERATOR, STREAM = "BatchGenerator", "generate_step"
AUTO = "auto"


@dataclass
class Drafting:
    """What became of drafts.

    Attributes:
        row_steps: steps, each counted once for every row.
        judged: drafts at each place, the first one 0, of steps that accepted all before it.
        kept: those of them that were accepted.
        depths: steps by the drafts that they judged for the row with the most.
    """

    row_steps: int = 0
    judged: Counter[int] = field(default_factory=Counter)
    kept: Counter[int] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)

    def add(self, steps: Sequence[RowStep]) -> None:
        self.row_steps += len(steps)
        for step in steps:
            self.judged.update(range(min(step.accepted + 1, step.drafted)))
            self.kept.update(range(step.accepted))
        if steps:
            self.depths[max(step.drafted for step in steps)] += 1


class Side(Protocol):
    """Something that decodes."""

    name: str

    def start(self, prompts: Sequence[list[int]]) -> None:
        """Read prompts; afterwards every step yields tokens of every row."""
        ...

    def step(self) -> int:
        """Run a step; how many tokens came out of it."""
        ...

    def stop(self) -> None:
        """Let go of all rows."""
        ...

    def take_drafting(self) -> Drafting:
        """What became of drafts since the last call."""
        ...


class DecoderSide:
    """This project's decoder, at one depth or, with a policy, at the depths that it chooses.

    Args:
        chunk: prompt tokens read at a time.
    """

    def __init__(
        self, decoder: Decoder, name: str, policy: AutoPolicy | None = None, chunk: int = 2048
    ) -> None:
        self.name = name
        self._decoder = decoder
        self._driver = DepthDriver(policy, decoder.depth) if policy else None
        self._clock = StepClock()
        self._chunk = chunk
        self._rows: list[str] = []
        self._drafting = Drafting()

    def start(self, prompts: Sequence[list[int]]) -> None:
        for index, prompt in enumerate(prompts):
            row = Row(str(index), list(prompt), FOREVER, Sampling(temperature=0.0))
            self._decoder.add(row)
            if self._driver:
                self._driver.add(row)
            self._rows.append(row.row_id)
        for row_id in self._rows:
            while self._decoder.prefill(row_id, self._chunk):
                pass
        if self._driver:
            self._clock.interrupt()
        waiting = set(self._rows)
        while waiting:
            waiting -= {step.row_id for step in self._step()}

    def step(self) -> int:
        return sum(len(step.tokens) for step in self._step())

    def stop(self) -> None:
        for row_id in self._rows:
            self._decoder.remove(row_id)
            if self._driver:
                self._driver.remove(row_id)
        self._rows = []
        mx.synchronize()

    def take_drafting(self) -> Drafting:
        taken, self._drafting = self._drafting, Drafting()
        return taken

    def _step(self) -> list[RowStep]:
        if self._driver is None:
            steps = self._decoder.step()
        else:
            changes = self._decoder.changes
            steps = self._decoder.step(self._driver.before(self._rows, self._decoder.slots))
            if self._decoder.changes != changes:
                self._clock.traced()
            seconds, alone = self._clock.step()
            emissions = [_as_emission(step) for step in steps]
            self._driver.after(emissions, seconds if alone else None)
        self._drafting.add(steps)
        return steps


def _as_emission(step: RowStep) -> Emission:
    tokens = [sampled.token for sampled in step.tokens]
    return Emission(step.row_id, tokens, "", drafted=step.drafted, accepted=step.accepted)


class BatchGeneratorSide:
    """`mlx_lm.generate.BatchGenerator`."""

    name = BATCH_GENERATOR

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._generator: BatchGenerator | None = None
        self._steps = 0

    def start(self, prompts: Sequence[list[int]]) -> None:
        self._generator = BatchGenerator(
            self._network,
            max_tokens=FOREVER,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        self._generator.insert([list(prompt) for prompt in prompts])
        while self.step() < len(prompts):
            pass

    def step(self) -> int:
        assert self._generator is not None
        tokens = len(self._generator.next_generated())
        self._steps += tokens
        return tokens

    def stop(self) -> None:
        if self._generator is not None:
            self._generator.close()
            self._generator = None

    def take_drafting(self) -> Drafting:
        taken, self._steps = Drafting(self._steps), 0
        return taken


class StreamSide:
    """`mlx_lm.generate.generate_step`, under `stream_generate`: one row."""

    name = STREAM

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._stream: Iterator[Any] = iter(())
        self._steps = 0

    def start(self, prompts: Sequence[list[int]]) -> None:
        [prompt] = prompts
        self._stream = generate_step(mx.array(prompt), self._network, max_tokens=FOREVER)
        self.step()

    def step(self) -> int:
        next(self._stream)
        self._steps += 1
        return 1

    def stop(self) -> None:
        self._stream = iter(())

    def take_drafting(self) -> Drafting:
        taken, self._steps = Drafting(self._steps), 0
        return taken
