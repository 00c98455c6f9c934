"""Decoders for families without a ragged form: mlx-lm's own loops, without drafts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_reduce
from mlx_lm.generate import BatchGenerator, generate_step

from omlx_worker.engine.ragged.footprint import GeneratorFootprint, RowBytes
from omlx_worker.engine.ragged.sampling import Draw, Plan, ReadDraw, Sampled, params, sample
from omlx_worker.engine.ragged.step import RowStep
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
        self._rows = [row.sampling]
        self._plan = Plan.of(self._rows)
        self._params = params(self._rows, self._plan)
        self._history = mx.array(row.history, mx.int32)
        self._position = row.length
        self._counts: mx.array | None = None
        self._logits: mx.array

    def read(self, _tokens: mx.array, logits: mx.array) -> mx.array:
        """Take ``[1, V]`` logits; mlx-lm calls it before each sample."""
        self._logits = logits
        return logits

    def __call__(self, _logprobs: mx.array) -> mx.array:
        """Sample from the logits that were read last."""
        logits = self._logits
        if self._plan.penalties and self._counts is None:
            empty = mx.zeros((logits.shape[-1],), mx.int32)
            self._counts = empty.at[self._history].add(1)[None, None]
        positions = mx.array([[self._position]], mx.int32)
        draw = sample(
            logits[:, None], positions, self._counts, self._rows, self._params, self._plan
        )
        self.draws.append(draw)
        token = draw.tokens[:, 0]
        if self._counts is not None:
            self._counts = self._counts.at[0, 0, token].add(1)
        self._position += 1
        return token


class _PlainDecoder:
    """What decoders over mlx-lm's own loops have in common: no drafts, and no way to pause a row.

    Args:
        reason: why the model is not decoded by the ragged batch.
    """

    depth = own_depth = 0
    looks_up = shares = False
    pads = True
    slow: Sequence[str] = ()

    def __init__(self, model: nn.Module, reason: str = "") -> None:
        self.reason = reason
        self.weight_bytes: int = tree_reduce(lambda n, w: n + w.nbytes, model.parameters(), 0)
        self._footprint = GeneratorFootprint(model)
        self._waiting: dict[str, Row] = {}

    @property
    def changes(self) -> int:
        """None: mlx-lm traces nothing."""
        return 0

    def add(self, row: Row) -> Known:
        self._waiting[row.row_id] = row
        return Known()

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:  # noqa: ARG002
        for row_id in tokens:
            self._insert(self._waiting.pop(row_id))
        return dict.fromkeys(tokens, 0)

    def finish(self, row_id: str) -> None:
        self.remove(row_id)

    def remove(self, row_id: str) -> None:
        if self._waiting.pop(row_id, None) is None:
            self._drop(row_id)

    def close(self) -> None:
        """There are no files."""

    def limit_prefixes(self, room: int) -> None:
        """There are none."""

    def suspend(self, row_id: str) -> bool:  # noqa: ARG002
        """A row's cache cannot be taken out of mlx-lm's loop and put back."""
        return False

    def resume(self, row_id: str) -> None:
        raise KeyError(row_id)

    def suspended_bytes(self, row_id: str) -> int:  # noqa: ARG002
        return 0

    @property
    def row_bytes(self) -> RowBytes:
        return self._footprint.of_row

    def bytes_for(self, rows: Sequence[tuple[int, int]], *, alone: bool = False) -> int:  # noqa: ARG002
        prompts = sum(self._footprint.of_prompt(to_read) for to_read, _ in rows)
        longest = max((tokens for _, tokens in rows), default=0)
        return prompts + self._footprint.of_batch(len(rows), longest)

    def _insert(self, row: Row) -> None:
        """Give a row to mlx-lm."""
        raise NotImplementedError

    def _drop(self, row_id: str) -> None:
        """Take a row from mlx-lm, if it has it."""
        raise NotImplementedError


def _sampler_of(row: Row) -> _RowSampler | None:
    """None for a greedy row, which mlx-lm's own sampler serves."""
    plain = Plan.of([row.sampling]) == Plan() and row.sampling.top_logprobs is None
    return None if plain else _RowSampler(row)


def _sampled(row: Row, token: int, sampler: _RowSampler | None) -> RowStep:
    if sampler is None:
        return RowStep(row.row_id, [Sampled(token)])
    return RowStep(row.row_id, [ReadDraw.of(sampler.draws.popleft().arrays).at(row, 0)])


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
        self._inserted: dict[int, tuple[Row, _RowSampler | None]] = {}

    @property
    def slots(self) -> int:
        return len(self._inserted)

    def _insert(self, row: Row) -> None:
        sampler = _sampler_of(row)
        left = row.max_tokens - len(row.generated)
        processors = [] if sampler is None else [sampler.read]
        [uid] = self._generator.insert(
            [row.history], [left], samplers=[sampler], logits_processors=[processors]
        )
        self._inserted[uid] = (row, sampler)

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:  # noqa: ARG002
        steps = []
        for response in self._generator.next_generated():
            row, sampler = self._inserted[response.uid]
            if response.finish_reason is not None:
                del self._inserted[response.uid]
            steps.append(_sampled(row, response.token, sampler))
        return steps

    def _drop(self, row_id: str) -> None:
        for uid, (row, _) in self._inserted.items():
            if row.row_id == row_id:
                del self._inserted[uid]
                self._generator.remove([uid])
                return


class SerialDecoder(_PlainDecoder):
    """A `Decoder` over mlx-lm's `generate_step`, which decodes one row after the other.

    For models that are right in no batch. The first step of a row reads its prompt.
    """

    name = "generate_step"

    def __init__(self, model: nn.Module, reason: str = "") -> None:
        super().__init__(model, reason)
        self._model = model
        # The first one decodes, the others wait for its end.
        self._rows: dict[str, tuple[Row, _RowSampler | None, Iterator[tuple[int, mx.array]]]] = {}

    @property
    def slots(self) -> int:
        return len(self._rows)

    def _insert(self, row: Row) -> None:
        sampler = _sampler_of(row)
        tokens = generate_step(
            mx.array(row.history),
            self._model,
            max_tokens=row.max_tokens - len(row.generated),
            sampler=sampler,
            logits_processors=[] if sampler is None else [sampler.read],
        )
        self._rows[row.row_id] = (row, sampler, tokens)

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:  # noqa: ARG002
        for row, sampler, tokens in self._rows.values():
            for token, _ in tokens:
                return [_sampled(row, token, sampler)]
        return []

    def _drop(self, row_id: str) -> None:
        self._rows.pop(row_id, None)
