"""Sides of a benchmark: this engine's decoder at some depth, and mlx-lm's own generators.

All have one interface: prompts in, then steps. No side stops at an end token, so each decodes the
same number of rows from start to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.sample_utils import make_sampler

from omlx_worker.decode.clock import StepClock
from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.depth.fixed import DepthPolicy, FixedPolicy
from omlx_worker.engine.engine import Decoder
from omlx_worker.engine.interface import Emission, Row, Sampling
from omlx_worker.engine.ragged.step import RowStep

FOREVER = 1 << 30
"""Token limit of a row; the end of a lap removes the row."""

CHUNK = 2048
"""Prompt tokens read at a time."""

GREEDY = Sampling(temperature=0.0)
BATCH_GENERATOR, STREAM = "BatchGenerator", "generate_step"
AUTO = "auto"


@dataclass
class Drafting:
    """Counts of steps and drafts.

    Attributes:
        row_steps: steps, each counted once for every row.
        judged: drafts at each place, the first one 0, in steps that accepted all before it.
        kept: those of them that were accepted.
        depths: steps by the largest number of drafts judged for a row.
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

    @property
    def accepted(self) -> list[float]:
        """The share of drafts accepted at each place."""
        return [self.kept[place] / self.judged[place] for place in sorted(self.judged)]

    @property
    def depth(self) -> int:
        """The depth of most steps."""
        return self.depths.most_common(1)[0][0] if self.depths else 0


class Side(Protocol):
    """Something that decodes.

    Attributes:
        drafting: counts the steps; a lap replaces it.
    """

    name: str
    drafting: Drafting

    def start(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        """Read prompts; afterwards every step yields tokens of every row."""

    def step(self) -> int:
        """Run a step and return the number of tokens it yielded."""

    def stop(self) -> None:
        """Remove all rows."""


class DecoderSide:
    """This project's decoder, at its own depth or at the depths that a policy chooses."""

    def __init__(self, decoder: Decoder, name: str, policy: DepthPolicy | None = None) -> None:
        self.name = name
        self.drafting = Drafting()
        self._decoder = decoder
        self._driver = DepthDriver(policy or FixedPolicy(decoder.depth), decoder.depth)
        self._clock = StepClock()
        self._rows: list[str] = []

    def start(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        for index, prompt in enumerate(prompts):
            row = Row(str(index), list(prompt), FOREVER, replace(sampling, seed=index))
            self._decoder.add(row)
            self._driver.add(row)
            self._rows.append(row.row_id)
        for row_id in self._rows:
            while self._decoder.prefill(row_id, CHUNK):
                pass
        self._clock.interrupt()
        waiting = set(self._rows)
        while waiting:
            waiting -= {step.row_id for step in self._step()}

    def step(self) -> int:
        return sum(len(step.tokens) for step in self._step())

    def stop(self) -> None:
        for row_id in self._rows:
            self._decoder.remove(row_id)
            self._driver.remove(row_id)
        self._rows = []
        mx.synchronize()

    def _step(self) -> list[RowStep]:
        changes = self._decoder.changes
        steps = self._decoder.step(self._driver.before(self._rows, self._decoder.slots))
        if self._decoder.changes != changes:
            self._clock.traced()
        seconds, alone = self._clock.step()
        self._driver.after([_as_emission(step) for step in steps], seconds if alone else None)
        self.drafting.add(steps)
        return steps


def _as_emission(step: RowStep) -> Emission:
    tokens = [sampled.token for sampled in step.tokens]
    return Emission(step.row_id, tokens, "", drafted=step.drafted, accepted=step.accepted)


class BatchGeneratorSide:
    """`mlx_lm.generate.BatchGenerator`."""

    name = BATCH_GENERATOR

    def __init__(self, network: nn.Module) -> None:
        self.drafting = Drafting()
        self._network = network
        self._generator: BatchGenerator | None = None

    def start(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        self._generator = BatchGenerator(
            self._network,
            max_tokens=FOREVER,
            sampler=make_sampler(sampling.temperature),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        self._insert(self._generator, prompts)
        while self.step() < len(prompts):
            pass

    def _insert(self, generator: BatchGenerator, prompts: Sequence[list[int]]) -> None:
        generator.insert([list(prompt) for prompt in prompts])

    def step(self) -> int:
        assert self._generator is not None
        tokens = len(self._generator.next_generated())
        self.drafting.row_steps += tokens
        return tokens

    def stop(self) -> None:
        if self._generator is not None:
            self._generator.close()
            self._generator = None


class StreamSide:
    """`mlx_lm.generate.generate_step`, under `stream_generate`: one row."""

    name = STREAM

    def __init__(self, network: nn.Module) -> None:
        self.drafting = Drafting()
        self._network = network
        self._stream: Iterator[Any] = iter(())

    def start(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        [prompt] = prompts
        self._stream = self._generate(prompt, make_sampler(sampling.temperature))
        self.step()

    def _generate(self, prompt: list[int], sampler: Callable[[mx.array], mx.array]) -> Any:
        return generate_step(mx.array(prompt), self._network, max_tokens=FOREVER, sampler=sampler)

    def step(self) -> int:
        next(self._stream)
        self.drafting.row_steps += 1
        return 1

    def stop(self) -> None:
        self._stream = iter(())
