"""The ragged batch: rows in slots, decoded together by one compiled step.

The state of a row is its committed tokens, whose keys, values and recurrent state are in the
caches, and one pending token that is not: the last prompt token at first, later the token
sampled last. A step runs one forward over every row's window, samples, and leaves the sampled
token pending. Cursors, pending tokens and counts stay on the device, and a step is dispatched
before the tokens of the one before it are read; the host reads once per step, one step late.

Shapes are buckets (slots, window, body capacity), so that a step is traced once per bucket and
sampling plan, not per join: rows write a slot when they join and free it when they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from omlx_worker.engine.cache import (
    TAIL,
    AttentionCache,
    RecurrentCache,
    Window,
    capacity_for,
)
from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.models import RaggedModel
from omlx_worker.engine.sampling import Draw, Knobs, Plan, Sampled, knobs, sample

SHRINK_AFTER = 32
"""Steps with half the slots empty before the batch is compacted, so that it does not flap."""

State = dict[str, mx.array]
Arrays = list[list[mx.array]]


@dataclass(slots=True)
class _Slot:
    """What the host knows of a row: ``cursor`` counts dispatched steps, read or not."""

    row: Row
    body_length: int
    cursor: int
    remaining: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """A dispatched step whose tokens are not read yet."""

    rows: list[tuple[int, _Slot]]
    draw: Draw


class Batch:
    """The rows being decoded on one model.

    Attributes:
        traces: how many times a step was traced, that is, compiled for a new bucket or plan.
        reads: how many times the host waited for the device to read tokens.
        drains: how many times the pipeline was drained to join, fold, grow or compact.
    """

    def __init__(self, model: RaggedModel) -> None:
        self._model = model
        self._slots: list[_Slot | None] = []
        self._caches: list[AttentionCache | RecurrentCache] = []
        self._state: State = {}
        self._plan = Plan()
        self._knobs: Knobs = {}
        self._knobs_stale = False
        self._steps: dict[Plan, Callable[..., Any]] = {}
        self._in_flight: _Flight | None = None
        self._slack = 0
        self.traces = 0
        self.reads = 0
        self.drains = 0

    def __len__(self) -> int:
        return sum(slot is not None for slot in self._slots)

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
        self._state["pending"][index] = row.prompt[-1]
        self._state["cursors"][index] = length
        self._state["body_lengths"][index] = length
        self._replan()
        if "counts" in self._state and row.sampling.penalises:
            self._recount(index, row)
        mx.eval(self._arrays(), self._state)

    def leave(self, row_id: str) -> None:
        """Free a row's slot; what a step in flight still samples for it is dropped."""
        for index, slot in enumerate(self._slots):
            if slot is not None and slot.row.row_id == row_id:
                slot.left = True
                self._slots[index] = None
                # A slot without a row must not write past its tail.
                self._state["cursors"][index] = 0
                self._state["body_lengths"][index] = 0
                self._knobs_stale = True
                break
        if not len(self):
            self._reset()

    def step(self) -> list[Sampled]:
        """Dispatch a step, then read the tokens of the one dispatched before it."""
        landed, self._in_flight = self._in_flight, self._dispatch()
        return self._read(landed) if landed else []

    def _dispatch(self) -> _Flight | None:
        live = [(index, slot) for index, slot in enumerate(self._slots) if slot is not None]
        if all(slot.remaining <= 0 for _, slot in live):
            return None
        self._compact(len(live))
        if any(slot.cursor - slot.body_length >= TAIL for _, slot in live):
            self._fold()
        if self._knobs_stale:
            self._replan()
        step = self._steps.get(self._plan) or self._compile(self._plan)
        draw, self._state, layers = self._unpack(step(self._state, self._knobs, self._arrays()))
        for cache, part in zip(self._caches, layers, strict=True):
            cache.advance(part)
        live = [(index, slot) for index, slot in enumerate(self._slots) if slot is not None]
        for _, slot in live:
            slot.cursor += 1
            slot.remaining -= 1
        mx.async_eval(draw.arrays, self._state, layers)
        return _Flight(live, draw)

    def _read(self, flight: _Flight) -> list[Sampled]:
        self.reads += 1
        draw = flight.draw.read()
        return [draw.at(slot.row, index) for index, slot in flight.rows if not slot.left]

    # The compiled step.

    def _compile(self, plan: Plan) -> Callable[..., Any]:
        model = self._model

        def step(state: State, knobs: Knobs, layers: Arrays) -> tuple[Any, State, Arrays]:
            self.traces += 1
            caches = model.wrap(layers)
            capacity = next((c.capacity for c in caches if isinstance(c, AttentionCache)), 0)
            cursors = state["cursors"]
            window = Window.at(cursors, state["body_lengths"], 1, capacity)
            hidden = model.forward(state["pending"][:, None], caches, window)
            counts = state.get("counts")
            draw = sample(
                model.logits(hidden),
                cursors[:, None] + 1,
                None if counts is None else counts[:, None],
                knobs,
                plan,
            )
            tokens = draw.tokens[:, 0]
            after = {**state, "pending": tokens, "cursors": cursors + knobs["active"]}
            if counts is not None:
                after["counts"] = counts.at[mx.arange(counts.shape[0]), tokens].add(1)
            return draw.arrays, after, [cache.written for cache in caches]

        self._steps[plan] = compiled = mx.compile(step)
        return compiled

    @staticmethod
    def _unpack(out: tuple[list[mx.array], State, Arrays]) -> tuple[Draw, State, Arrays]:
        drawn, state, layers = out
        return Draw(*drawn), state, layers

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
            self._state = {
                name: mx.zeros((1,), mx.int32) for name in ("pending", "cursors", "body_lengths")
            }
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
        self._drain()
        self._grow(capacity_for(max(slot.cursor for slot in self._slots if slot)))
        for index, slot in enumerate(self._slots):
            if slot is None:
                continue
            for cache in self._caches:
                if isinstance(cache, AttentionCache):
                    cache.fold(index, slot.body_length, slot.cursor)
            slot.body_length = slot.cursor
        self._state["body_lengths"] = self._state["cursors"]
        mx.eval(self._arrays())

    def _compact(self, live: int) -> None:
        """Halve the slots once half of them have been empty for a while."""
        self._slack = self._slack + 1 if 2 * live <= len(self._slots) else 0
        if self._slack >= SHRINK_AFTER:
            self._drain()
            self._resize(len(self._slots) // 2)
            self._slack = 0

    def _resize(self, size: int) -> None:
        kept = [index for index, slot in enumerate(self._slots) if slot is not None]
        for cache in self._caches:
            cache.pick(kept, size)
        picked = mx.array(kept, mx.int32)
        for name, array in self._state.items():
            padding = [(0, size - len(kept))] + [(0, 0)] * (array.ndim - 1)
            self._state[name] = mx.pad(array[picked] if kept else array[:0], padding)
        moved = [self._slots[index] for index in kept]
        self._slots = moved + [None] * (size - len(moved))
        self._knobs_stale = True
        mx.eval(self._arrays(), self._state)

    def _reset(self) -> None:
        """Let go of every buffer, and of the step in flight, once no row is left."""
        self._slots, self._caches, self._state = [], [], {}
        self._in_flight, self._slack = None, 0

    def _replan(self) -> None:
        rows = [slot.row.sampling if slot else Sampling(temperature=0) for slot in self._slots]
        plan = Plan.of(rows)
        self._plan = plan
        self._knobs = knobs(rows, plan)
        self._knobs["active"] = mx.array([slot is not None for slot in self._slots], mx.int32)
        self._knobs_stale = False
        if not plan.penalties:
            self._state.pop("counts", None)
        elif "counts" not in self._state:
            shape = (len(self._slots), self._model.vocabulary)
            self._state["counts"] = mx.zeros(shape, mx.int32)

    def _recount(self, index: int, row: Row) -> None:
        """Count a joining row's prompt, its pending token included."""
        tokens = mx.array(row.prompt, mx.int32)
        counts = mx.zeros((self._model.vocabulary,), mx.int32).at[tokens].add(1)
        self._state["counts"][index] = counts
