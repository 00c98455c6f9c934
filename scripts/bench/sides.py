"""What is measured against what: mlx-lm's generators and this engine's batch, driven alike.

Every side takes the same prompts, read beforehand into mlx-lm's own caches, and is then stepped.
None of them stops at an end token, so that all decode the same number of rows throughout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from given_caches import given
from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import KVCache
from mlx_lm.sample_utils import make_sampler

from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.depth.fixed import AutoPolicy
from omlx_worker.decode.loop import CHANGE_STEPS
from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.ragged.batch import Batch

FOREVER = 1 << 30


@dataclass(frozen=True)
class Prompt:
    """Tokens, and mlx-lm's caches of all but the last: the backbone's layers, then the head's."""

    tokens: list[int]
    caches: list[Any]

    def bytes_after(self, decoded: int, layers: int) -> int:
        """What the first caches hold once so many more tokens are decoded."""
        longer = (len(self.tokens) - 1 + decoded) / (len(self.tokens) - 1)
        total = 0.0
        for cache in self.caches[:layers]:
            if isinstance(cache, KVCache):
                total += longer * sum(array.nbytes for array in cache.keys_and_values())
            else:
                total += sum(array.nbytes for array in cache.cache)
        return round(total)


@dataclass
class Drafting:
    """What became of drafts: accepted at each place, and steps of rows."""

    row_steps: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=lambda: [0] * 8)


class Side(Protocol):
    """Something that decodes.

    Attributes:
        layers: how many of a prompt's caches it takes.
    """

    name: str
    layers: int
    drafting: Drafting | None

    def start(self, prompts: Sequence[Prompt], temperature: float, rule: str) -> None: ...

    def step(self) -> int:
        """Run a step; how many tokens came out of it."""
        ...

    def stop(self) -> None:
        """Let go of all rows."""
        ...


class StreamGenerate:
    """`mlx_lm.stream_generate`: one row."""

    name = "stream_generate"
    drafting = None

    def __init__(self, network: nn.Module, tokenizer: Any, layers: int) -> None:
        self._network = network
        self._tokenizer = copy.copy(tokenizer)
        self._tokenizer._eos_token_ids = set()
        self.layers = layers
        self._stream: Iterator[Any] = iter(())

    def start(self, prompts: Sequence[Prompt], temperature: float, rule: str) -> None:  # noqa: ARG002
        (prompt,) = prompts
        self._stream = stream_generate(
            self._network,
            self._tokenizer,
            prompt.tokens[-1:],
            max_tokens=FOREVER,
            prompt_cache=copy.deepcopy(prompt.caches[: self.layers]),
            sampler=make_sampler(temperature),
        )

    def step(self) -> int:
        next(self._stream)
        return 1

    def stop(self) -> None:
        self._stream = iter(())


class MlxLmBatch:
    """`mlx_lm.generate.BatchGenerator`, its rows taken in all at once."""

    name = "BatchGenerator"
    drafting = None

    def __init__(self, network: nn.Module, layers: int) -> None:
        self.layers = layers
        self._network = network
        self._generator: BatchGenerator | None = None

    def start(self, prompts: Sequence[Prompt], temperature: float, rule: str) -> None:  # noqa: ARG002
        self._generator = BatchGenerator(
            self._network,
            max_tokens=FOREVER,
            sampler=make_sampler(temperature),
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
        )
        self._generator.insert(
            [prompt.tokens[-1:] for prompt in prompts],
            caches=[given(prompt.caches[: self.layers]) for prompt in prompts],
        )
        while self.step() < len(prompts):
            pass

    def step(self) -> int:
        assert self._generator is not None
        return len(self._generator.next_generated())

    def stop(self) -> None:
        assert self._generator is not None
        self._generator.close()
        self._generator = None


class Ragged:
    """This engine's batch, at one depth or, as ``auto``, at depths chosen while it works."""

    def __init__(self, network: nn.Module, depth: int, *, auto: bool = False) -> None:
        self.name = "auto" if auto else f"K={depth}"
        self.drafting = Drafting()
        model = as_ragged(network, drafts=depth > 0)
        assert model is not None
        self._model = model
        self._batch = Batch(model, depth, varies=auto)
        self._driver = DepthDriver(AutoPolicy(depth), depth) if auto else None
        self._rows: list[str] = []
        # The batch takes the head's cache only where it drafts.
        self.layers = len(model.new_prompt_cache())
        self.depths: dict[int, int] = {}
        """Steps by the depth that they verified."""

    def start(self, prompts: Sequence[Prompt], temperature: float, rule: str) -> None:
        for index, prompt in enumerate(prompts):
            sampling = Sampling(temperature, seed=index, ratio=rule == "ratio")
            row = Row(str(index), prompt.tokens, FOREVER, sampling)
            self._batch.join(row, self._model.prompt_arrays(prompt.caches)[: self.layers])
            self._rows.append(row.row_id)
            if self._driver:
                self._driver.add(row)
        if self._driver:
            self._driver.disturb()

    def forget(self) -> None:
        """Count drafts and depths from here on."""
        self.drafting, self.depths = Drafting(), {}

    def step(self) -> int:
        depths = self._driver.before(self._rows, self._batch.slots) if self._driver else None
        changes = self._batch.traces + self._batch.drains
        steps = self._batch.step(depths)
        if self._driver:
            if self._batch.traces + self._batch.drains != changes:
                self._driver.disturb(CHANGE_STEPS)
            self._driver.after(steps)  # type: ignore[arg-type]
        for step in steps:
            self.drafting.row_steps += 1
            self.drafting.drafted += step.drafted
            for place in range(step.accepted):
                self.drafting.accepted[place] += 1
        if steps:
            verified = max(step.drafted for step in steps)
            self.depths[verified] = self.depths.get(verified, 0) + 1
        return sum(len(step.tokens) for step in steps)

    def stop(self) -> None:
        for row in self._rows:
            self._batch.leave(row)
            if self._driver:
                self._driver.remove(row)
        self._rows = []
        mx.synchronize()
