"""Decoders for families without a ragged form: mlx-lm's own loops, without drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream

from omlx_worker.engine.ragged.footprint import GeneratorFootprint
from omlx_worker.engine.ragged.sampling import (
    Draw,
    Plan,
    ReadDraw,
    Sampled,
    Scored,
    counts_of,
    params,
    sample,
)
from omlx_worker.engine.ragged.step import RowStep
from omlx_worker.engine.ragged.thinking import after, along, forced, thoughts_of
from omlx_worker.engine.rows.interface import Size
from omlx_worker.engine.rows.row import Known, Row

PREFILL_CHUNK = 512
"""Tokens of a prompt that are read within a step, at most."""


class _RowSampler:
    """One row's sampler, called by mlx-lm once a token. Noise and filters are those of the batch.

    mlx-lm gives a sampler log-probabilities, but the repetition penalty is of logits, which
    differ by more than a constant once it has scaled them. So `read`, a logits processor that
    changes nothing, keeps the logits of the coming sample.

    Attributes:
        draws: samples whose tokens the generator has not returned yet, oldest first.
    """

    def __init__(self, row: Row) -> None:
        self.draws: deque[Draw] = deque()
        self._row = row
        self._plan = Plan.of([row.sampling])
        self._params = params([row.sampling], self._plan)
        self._position = row.length
        self._counts: mx.array | None = None
        self._thoughts = thoughts_of(row) if self._plan.thoughts else None
        self._logits: mx.array

    def read(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        """Take ``[1, V]`` logits; mlx-lm calls it before each sample."""
        self._logits = logits
        return logits

    def __call__(self, _logprobs: mx.array) -> mx.array:
        """Sample from the logits that were read last."""
        logits, rows = self._logits, [self._row.sampling]
        if self._plan.penalties and self._counts is None:
            self._counts = counts_of(self._row.history, logits.shape[-1])[None, None]
        positions = mx.array([[self._position]], mx.int32)
        thoughts, params, plan = self._thoughts, self._params, self._plan
        must = None if thoughts is None else forced(along(thoughts, None, params), params)
        draw = sample(logits[:, None], positions, self._counts, rows, params, plan, must)
        self.draws.append(draw)
        token = draw.tokens[:, 0]
        if self._counts is not None:
            self._counts = self._counts.at[0, 0, token].add(1)
        if thoughts is not None:
            self._thoughts = after(thoughts, token, params)
        self._position += 1
        return token


@dataclass(slots=True)
class _Running:
    """A row that decodes.

    Attributes:
        sampler: None for a greedy row, which mlx-lm's own sampler serves.
        handle: what mlx-lm's loop knows it by.
    """

    row: Row
    sampler: _RowSampler | None
    handle: Any = None

    def outcome(self, token: int) -> RowStep:
        """What a step that brings this token made of the row."""
        sampled = Sampled(token)
        if self.sampler is not None:
            sampled = ReadDraw.of(self.sampler.draws.popleft().arrays).at(self.row, 0)
        return RowStep(self.row.row_id, [sampled])


class _PlainDecoder:
    """What decoders over mlx-lm's own loops have in common: no drafts, no prefixes, no files, and
    no way to take a row's cache out of the loop and put it back.

    Args:
        reason: why the model is not decoded by the ragged batch.
    """

    max_depth = own_depth = changes = 0
    looks_up = shares = False
    pads = True
    slow: Sequence[str] = ()

    def __init__(self, model: nn.Module, reason: str = "") -> None:
        self.reason = reason
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)
        self._model = model
        self._footprint = GeneratorFootprint(model)
        self.row_bytes = self._footprint.of_row
        self._waiting: dict[str, Row] = {}
        self._running: dict[str, _Running] = {}

    @property
    def slots(self) -> int:
        return len(self._running)

    def add(self, row: Row) -> Known:
        self._waiting[row.row_id] = row
        return Known()

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:  # noqa: ARG002
        for row_id in tokens:
            row = self._waiting.pop(row_id)
            plain = Plan.of([row.sampling]) == Plan() and row.sampling.top_logprobs is None
            running = self._running[row_id] = _Running(row, None if plain else _RowSampler(row))
            processors = [running.sampler.read] if running.sampler else []
            running.handle = self._start(row, running.sampler, processors)
        return dict.fromkeys(tokens, 0)

    def _start(self, row: Row, sampler: _RowSampler | None, processors: list[Any]) -> Any:
        """Give a row to mlx-lm; returns its handle."""
        raise NotImplementedError

    def take_scores(self) -> dict[str, list[Scored]]:
        return {}

    def remove(self, row_id: str) -> None:
        self._waiting.pop(row_id, None)
        self._running.pop(row_id, None)

    def finish(self, row_id: str) -> None:
        self.remove(row_id)

    def wait(self) -> None:
        mx.synchronize(generation_stream)

    def close(self) -> None: ...

    def limit_prefixes(self, room: int) -> None: ...

    def suspend(self, row_id: str) -> bool:  # noqa: ARG002
        return False

    def resume(self, row_id: str) -> None:
        raise KeyError(row_id)

    def suspended_bytes(self, row_id: str) -> int:  # noqa: ARG002
        return 0

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:  # noqa: ARG002
        return self._footprint.of_rows(rows)


class GeneratorDecoder(_PlainDecoder):
    """A `Decoder` over a `BatchGenerator`, which reads prompts within its own steps."""

    name = "BatchGenerator"

    def __init__(self, model: nn.Module, max_rows: int, reason: str = "") -> None:
        super().__init__(model, reason)
        self._generator = BatchGenerator(
            model, completion_batch_size=max_rows, prefill_step_size=PREFILL_CHUNK
        )
        # Making a generator wires memory; this undoes it. Whether to wire is the user's choice.
        self._generator.close()

    def _start(self, row: Row, sampler: _RowSampler | None, processors: list[Any]) -> int:
        left = row.max_tokens - len(row.generated)
        [uid] = self._generator.insert(
            [row.history], [left], samplers=[sampler], logits_processors=[processors]
        )
        return int(uid)

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:  # noqa: ARG002
        steps = []
        running = {each.handle: each for each in self._running.values()}
        for response in self._generator.next_generated():
            steps.append(running[response.uid].outcome(response.token))
            if response.finish_reason is not None:
                del self._running[running[response.uid].row.row_id]
        return steps

    def remove(self, row_id: str) -> None:
        if running := self._running.get(row_id):
            self._generator.remove([running.handle])
        super().remove(row_id)


class SerialDecoder(_PlainDecoder):
    """A `Decoder` over mlx-lm's `generate_step`, which decodes one row after the other.

    For models that are right in no batch. The first step of a row reads its prompt.
    """

    name = "generate_step"

    def _start(self, row: Row, sampler: _RowSampler | None, processors: list[Any]) -> Any:
        left = row.max_tokens - len(row.generated)
        return generate_step(
            mx.array(row.history),
            self._model,
            max_tokens=left,
            sampler=sampler,
            logits_processors=processors,
        )

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:  # noqa: ARG002
        # The first row decodes, the others wait for its end.
        for running in self._running.values():
            for token, _ in running.handle:
                return [running.outcome(token)]
        return []
