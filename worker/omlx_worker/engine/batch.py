"""The ragged batch: rows in slots, drafting and plain alike, decoded by one compiled step.

A row is its committed tokens, whose keys, values and recurrent state are in the caches, and one
pending token that is not: the last prompt token at first, later the token sampled last. A step
runs one forward over every row's window, the pending token and the drafts after it; see
`omlx_worker.engine.step`. Cursors, pending tokens and drafts stay on the device, and a step is
dispatched before the tokens of the one before it are read: the host reads once per step, one
step late, and until then knows bounds of every cursor.

Shapes are buckets (slots, window, body capacity), so that a step is traced once per bucket and
sampling plan, not per join: rows write a slot when they join and free it when they leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_worker.engine.attention_cache import TAIL, AttentionCache, capacity_for
from omlx_worker.engine.backlog import Backlog
from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.models import LayerCache, RaggedModel
from omlx_worker.engine.recurrent_cache import RecurrentCache
from omlx_worker.engine.sampling import Knobs, Plan, knobs
from omlx_worker.engine.slots import pick
from omlx_worker.engine.step import Arrays, RowStep, State, Verdict, compiled

SHRINK_AFTER = 32
"""Steps with half the slots empty before the batch is compacted, so that it does not flap."""

_PER_ROW = ("pending", "cursors", "body_lengths", "accepted", "drafted")


@dataclass(slots=True)
class _Slot:
    """What the host knows of a row.

    Attributes:
        cursor: at most this; exact once every dispatched step is read.
        remaining: tokens that may still be wanted, at most this; likewise.
    """

    row: Row
    body_length: int
    cursor: int
    remaining: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """A dispatched step whose outcome is not read yet."""

    rows: list[tuple[int, _Slot]]
    width: int
    verdict: Verdict


class Batch:
    """The rows being decoded on one model.

    Attributes:
        depth: drafts per row and step, at most; rows may have a lower limit of their own.
        varies: whether steps may be asked for fewer drafts than that.
        traces: how many times a step was traced, that is, compiled for a new bucket or plan.
        reads: how many times the host waited for the device to read an outcome.
        drains: how many times the pipeline was drained to join, fold, grow or compact.
    """

    def __init__(self, model: RaggedModel, depth: int = 0, *, varies: bool = False) -> None:
        self.depth = depth if model.drafts else 0
        self.varies = varies and self.depth > 0
        self._model = model
        self._slots: list[_Slot | None] = []
        self._caches: list[LayerCache] = []
        self._state: State = {}
        self._plan = Plan()
        self._knobs: Knobs = {}
        self._knobs_stale = False
        self._steps: dict[tuple[Plan, int], Any] = {}
        self._in_flight: _Flight | None = None
        self._slack = 0
        self._depths: Mapping[str, int] = {}
        self._backlog = Backlog(model) if self.varies else None
        self.traces = 0
        self.reads = 0
        self.drains = 0

    def __len__(self) -> int:
        return len(self._live())

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """Positions of every attention body."""
        return next((c.capacity for c in self._caches if isinstance(c, AttentionCache)), 0)

    def join(self, row: Row, prompt: Sequence[Sequence[mx.array]]) -> None:
        """Add a row whose prompt, but for its last token, was prefilled.

        Args:
            prompt: for every layer what its cache's `write` takes; empty for a one-token prompt.
        """
        length = len(row.prompt) - 1
        self._drain()
        self._reserve(max(length, 1))
        index = self._slots.index(None)
        if prompt:
            for cache, part in zip(self._caches, prompt, strict=True):
                cache.write(index, part)
        else:
            for cache in self._caches:
                if isinstance(cache, RecurrentCache):
                    cache.clear(index)
        self._slots[index] = _Slot(row, length, length, row.max_tokens)
        if self._backlog:
            self._backlog.restart()
        values = dict(zip(_PER_ROW, (row.prompt[-1], length, length, 0, 0), strict=True))
        for name, value in values.items():
            self._state[name][index] = value
        self._replan()
        if "counts" in self._state and row.sampling.penalises:
            self._state["counts"][index] = _counts(row.prompt, self._model.vocabulary)
        mx.eval(self._arrays(), self._state)

    def leave(self, row_id: str) -> None:
        """Free a row's slot; what a step in flight still samples for it is dropped."""
        for index, slot in self._live():
            if slot.row.row_id == row_id:
                slot.left = True
                self._slots[index] = None
                # A slot without a row must not write past its tail.
                self._state["cursors"][index] = 0
                self._state["body_lengths"][index] = 0
                self._knobs_stale = True
        if not self._live():
            self._reset()

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:
        """Dispatch a step, then read the outcome of the one dispatched before it.

        Args:
            depths: how many tokens to draft for each row, for the next step to judge; rows not
                named, and all rows by default, get as many as they may have.
        """
        if self.varies and depths is not None and depths != self._depths:
            self._depths = dict(depths)
            self._knobs_stale = True
        landed, self._in_flight = self._in_flight, self._dispatch()
        return self._read(landed) if landed else []

    def _live(self) -> list[tuple[int, _Slot]]:
        return [(index, slot) for index, slot in enumerate(self._slots) if slot is not None]

    def _dispatch(self) -> _Flight | None:
        if all(slot.remaining <= 0 for _, slot in self._live()):
            return None
        self._compact()
        if self._knobs_stale:
            self._replan()
        depth = max(self._depth_of(slot.row) for _, slot in self._live())
        self._mind_the_head(depth)
        width = 1 + (self._state["drafts"].shape[1] if "drafts" in self._state else 0)
        # The window's tokens, and the head's own for every draft but the first.
        reach = width + max(depth - 1, 0)
        if any(slot.cursor - slot.body_length + reach > TAIL for _, slot in self._live()):
            self._fold()
        step = self._steps.get((self._plan, depth)) or self._compile(depth)
        verdict, self._state, written = step(self._state, self._knobs, self._arrays())
        for cache, part in zip(self._caches, written, strict=True):
            cache.advance(part)
        live = self._live()
        for _, slot in live:
            slot.cursor += width
            slot.remaining -= 1
        mx.async_eval(verdict.arrays, self._state, written)
        return _Flight(live, width, verdict)

    def _read(self, flight: _Flight) -> list[RowStep]:
        self.reads += 1
        verdict = flight.verdict.read()
        steps = []
        for index, slot in flight.rows:
            if slot.left:
                continue
            step = verdict.at(slot.row, index)
            slot.cursor -= flight.width - len(step.tokens)
            slot.remaining -= step.accepted
            steps.append(step)
        return steps

    def _depth_of(self, row: Row) -> int:
        limit = self.depth if row.depth is None else min(self.depth, row.depth)
        return min(limit, self._depths.get(row.row_id, limit))

    def _mind_the_head(self, depth: int) -> None:
        """Let the head catch up before a step that drafts; note where it stops otherwise."""
        if self._backlog is None:
            return
        offsets = [slot.cursor - slot.body_length for _, slot in self._live()]
        if depth:
            self._backlog.read(self._state, self._caches, max(offsets))
        else:
            self._backlog.open(min(offsets) - (self._in_flight.width if self._in_flight else 1))

    def _compile(self, depth: int) -> Any:
        def on_trace() -> None:
            self.traces += 1

        self._steps[self._plan, depth] = step = compiled(self._model, self._plan, depth, on_trace)
        return step

    # Slots, capacity and settings: between steps, with the pipeline drained.

    def _arrays(self) -> Arrays:
        return [cache.arrays for cache in self._caches]

    def _drain(self) -> None:
        """Wait for the step in flight, so that nothing but the caches holds their buffers."""
        if self._state:
            self.drains += 1
            mx.eval(self._arrays(), self._state)

    def _reserve(self, positions: int) -> None:
        """Make sure of a free slot, of capacity for a prompt, and of the arrays themselves."""
        capacity = capacity_for(positions)
        if not self._caches:
            self._slots = [None]
            self._caches = self._model.new_caches(1, capacity)
            self._state = {name: mx.zeros((1,), mx.int32) for name in _PER_ROW}
            if self.varies:
                hidden = (1, TAIL, self._model.hidden)
                self._state["hidden"] = mx.zeros(hidden, self._model.dtype)
                self._state["following"] = mx.zeros((1, TAIL), mx.int32)
        if None not in self._slots:
            self._resize(2 * len(self._slots))
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        if capacity > self.capacity:
            for cache in self._caches:
                if isinstance(cache, AttentionCache):
                    cache.grow(capacity)

    def _fold(self) -> None:
        """Move every tail to its body and start the tails afresh."""
        if self._backlog and self._backlog.begin is not None:
            self._backlog.read(self._state, self._caches, TAIL)
            self._backlog.open(0)
        self._drain()
        cursors: list[int] = self._state["cursors"].tolist()  # type: ignore[assignment]
        self._grow(capacity_for(max(cursors)))
        for index, slot in self._live():
            for cache in self._caches:
                if isinstance(cache, AttentionCache):
                    cache.fold(index, slot.body_length, cursors[index])
            slot.body_length = cursors[index]
        self._state["body_lengths"] = self._state["cursors"]
        mx.eval(self._arrays())
        # Buffers of shapes that are gone would otherwise pile up in a worker that runs for days.
        mx.clear_cache()

    def _compact(self) -> None:
        """Halve the slots once half of them have been empty for a while."""
        self._slack = self._slack + 1 if 2 * len(self._live()) <= len(self._slots) else 0
        if self._slack >= SHRINK_AFTER:
            self._drain()
            self._resize(len(self._slots) // 2)
            self._slack = 0

    def _resize(self, size: int) -> None:
        kept = [index for index, _ in self._live()]
        for cache in self._caches:
            cache.pick(kept, size)
        self._state = {name: pick(array, kept, size) for name, array in self._state.items()}
        moved = [self._slots[index] for index in kept]
        self._slots = moved + [None] * (size - len(moved))
        self._knobs_stale = True
        mx.eval(self._arrays(), self._state)
        mx.clear_cache()

    def _reset(self) -> None:
        """Let go of every buffer, and of the step in flight, once no row is left."""
        self._slots, self._caches, self._state = [], [], {}
        self._in_flight, self._slack = None, 0
        if self._backlog:
            self._backlog.clear()

    def _replan(self) -> None:
        """Take up the settings of the rows that are there now."""
        rows = [slot.row.sampling if slot else Sampling(temperature=0) for slot in self._slots]
        depths = [self._depth_of(slot.row) if slot else 0 for slot in self._slots]
        self._plan = Plan.of(rows, drafts=self.depth > 0)
        self._knobs = knobs(rows, self._plan)
        self._knobs["active"] = mx.array([slot is not None for slot in self._slots], mx.int32)
        self._knobs["depth"] = mx.array(depths, mx.int32)
        self._knobs_stale = False
        self._keep("counts", self._plan.penalties, (), mx.int32)
        if "drafts" in self._state:
            depth = self._state["drafts"].shape[1]
            self._keep("weights", self._plan.ratio, (depth,), mx.float32)

    def _keep(self, name: str, wanted: bool, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Hold an array over the vocabulary only while the plan needs it."""
        if not wanted:
            self._state.pop(name, None)
        elif name not in self._state:
            full = (len(self._slots), *shape, self._model.vocabulary)
            self._state[name] = mx.zeros(full, dtype)


def _counts(tokens: Sequence[int], vocabulary: int) -> mx.array:
    """How often each token of the vocabulary occurs, ``[V]`` int32."""
    return mx.zeros((vocabulary,), mx.int32).at[mx.array(list(tokens), mx.int32)].add(1)
