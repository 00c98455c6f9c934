"""The decoder of models without a ragged form: mlx-lm's `generate_step`, a row at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_reduce
from mlx_lm.generate import generate_step

from omlx_worker.engine.ragged.footprint import GeneratorFootprint
from omlx_worker.engine.ragged.masks import BITS, hold
from omlx_worker.engine.ragged.sampling import (
    Draw,
    Plan,
    counts_of,
    params,
    sample,
)
from omlx_worker.engine.rows.interface import Size
from omlx_worker.engine.rows.row import Known, Row, RowStep, Sampled, Scored
from omlx_worker.engine.rows.thinking import Thoughts

PREFILL_CHUNK = 512
"""Tokens of a prompt that are read at once."""


class _RowSampler:
    """One row's sampler, called by mlx-lm once a token. Noise and filters are those of the batch.

    mlx-lm gives a sampler log-probabilities, but the repetition penalty is of logits, which
    differ by more than a constant once it has scaled them. So `read`, a logits processor that
    changes nothing, keeps the logits of the coming sample.
    """

    def __init__(self, row: Row) -> None:
        self._row = row
        self._plan = Plan.of([row.sampling])
        self._params = params([row.sampling], self._plan)
        self._position = row.length
        self._counts: mx.array | None = None
        thinking = row.sampling.thinking
        self._thoughts = Thoughts(thinking, row.generated) if thinking else None
        self._draws: deque[list[mx.array]] = deque()  # that the host has not read, oldest first
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
        counts, params, plan, allowed = self._counts, self._params, self._plan, self._allowed()
        draw = sample(logits[:, None], positions, counts, rows, params, plan, allowed)
        self._draws.append(draw)
        token = draw[0][:, 0]
        if self._counts is not None:
            self._counts = self._counts.at[0, 0, token].add(1)
        self._position += 1
        return token

    def _allowed(self) -> mx.array | None:
        """The mask of the next sample; None where the budget of thinking is far."""
        if not (self._thoughts and self._thoughts.nears_budget(len(self._draws))):
            return None
        mx.async_eval(self._logits)  # before the host waits for the last token
        unread: list[Any] = [tokens.item() for tokens, *_ in self._draws]
        words = -(-self._logits.shape[-1] // BITS)
        bits = np.full((1 + len(unread), words), -1, np.int32)
        hold(self._thoughts, unread, bits)
        return mx.array(bits.view(np.uint32))[None, -1:]

    def sampled(self) -> Sampled:
        """The oldest sample that was not returned yet. Waits for the device."""
        sampled = Draw.of(self._draws.popleft()).at(self._row, 0)
        if self._thoughts:
            self._thoughts.feed(sampled.token)
        return sampled


class SerialDecoder:
    """A `Decoder` without drafts, prefixes and files. A row's first step reads its prompt; the
    others wait for its end.

    Args:
        reason: why the model is not decoded by the ragged batch.
    """

    name = "generate_step"
    max_depth = own_depth = traces = stalls = 0
    looks_up = shares = False
    pads = True
    slow_parts: Sequence[str] = ()

    def __init__(self, model: nn.Module, reason: str = "") -> None:
        self.reason = reason
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)
        self._model = model
        self.footprint = GeneratorFootprint(model)
        self._waiting: dict[str, Row] = {}
        self._running: dict[str, Iterator[RowStep]] = {}

    @property
    def slots(self) -> int:
        return len(self._running)

    def add(self, row: Row) -> Known:
        self._waiting[row.row_id] = row
        return Known(left=row.length - 1)

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:  # noqa: ARG002
        for row_id in tokens:
            self._running[row_id] = self._steps(self._waiting.pop(row_id))
        return dict.fromkeys(tokens, 0)

    def _steps(self, row: Row) -> Iterator[RowStep]:
        """The steps of a row, each of one token."""
        # Greedy rows need no sampler of their own.
        sampling = row.sampling
        asks = sampling.top_logprobs is not None or sampling.thinking is not None
        plain = Plan.of([sampling]) == Plan() and not asks
        sampler = None if plain else _RowSampler(row)
        left = row.max_tokens - len(row.generated)
        options: dict[str, Any] = {"max_tokens": left, "prefill_step_size": PREFILL_CHUNK}
        if sampler:
            options |= {"sampler": sampler, "logits_processors": [sampler.read]}
        for token, _ in generate_step(mx.array(row.history), self._model, **options):
            yield RowStep(row.row_id, [sampler.sampled() if sampler else Sampled(token)])

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:  # noqa: ARG002
        for steps in self._running.values():
            for step in steps:
                return [step]
        return []

    def take_reports(self) -> dict[str, list[Scored]]:
        return {}

    def remove(self, row_id: str) -> None:
        self._waiting.pop(row_id, None)
        self._running.pop(row_id, None)

    finish = remove

    def close(self) -> None: ...

    def keep_within(self, limit: int) -> None: ...

    def limit_prefixes(self, room: int) -> None: ...

    def suspend(self, row_id: str) -> int | None:  # noqa: ARG002
        return None

    def resume(self, row_id: str) -> None:
        raise KeyError(row_id)

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:  # noqa: ARG002
        return self.footprint.of_rows(rows)
