"""The ragged batch: rows in slots, drafting and plain alike, decoded by one compiled step.

A row is its committed tokens, whose keys, values and recurrent state are in the caches, and one
pending token that is not: the last prompt token at first, later the token sampled last. A step
runs one forward over every row's window, the pending token and the drafts after it; see
`omlx_worker.engine.ragged.step`. Cursors, pending tokens and drafts stay on the device, and a step
is dispatched before the tokens of the one before it are read: the host reads once per step, one
step late, and until then knows bounds of every cursor.

Shapes are buckets (slots and capacities, window), so that a step is traced once per bucket and
sampling plan, not per join: see `omlx_worker.engine.ragged.seats` for who sits where and when that
changes. A row can be taken out of the batch with all that it has, and put back later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.footprint import Footprint
from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.attention_cache import TAIL, Spans, spans_of
from omlx_worker.engine.ragged.change_of_depth import fit
from omlx_worker.engine.ragged.layout import Layout, grown, reachable
from omlx_worker.engine.ragged.programs import Programs
from omlx_worker.engine.ragged.sampling import Knobs, Plan, knobs
from omlx_worker.engine.ragged.seats import Seats, Slot
from omlx_worker.engine.ragged.snapshot import Snapshot
from omlx_worker.engine.ragged.step import CompiledStep, RowStep, Verdict, compiled


@dataclass(frozen=True, slots=True)
class _Flight:
    """A dispatched step whose outcome is not read yet.

    Attributes:
        rows: each with its index in the verdict, whose slot may be another by now.
    """

    rows: list[tuple[int, Slot]]
    width: int
    verdict: Verdict


class Batch:
    """The rows being decoded on one model.

    Attributes:
        depth: drafts per row and step, at most; rows may have a lower limit of their own.
        reads: how many times the host waited for the device to read an outcome.
    """

    def __init__(self, model: RaggedModel, depth: int = 0) -> None:
        self.depth = depth if model.drafts else 0
        self.reads = 0
        self._model = model
        self._seats = Seats(model)
        self._buffers = self._seats.buffers
        self._footprint = Footprint(model, self.depth)
        self._suspended: dict[str, tuple[Slot, Snapshot]] = {}
        self._plan = Plan()
        self._knobs: Knobs = {}
        self._depths: Mapping[str, int] = {}
        self._steps: Programs[tuple[Plan, int, Spans], CompiledStep] = Programs()
        self._in_flight: _Flight | None = None

    def __len__(self) -> int:
        return len(self._seats.taken)

    @property
    def slots(self) -> int:
        return len(self._seats.slots)

    @property
    def layout(self) -> Layout:
        return self._buffers.layout

    @property
    def traces(self) -> int:
        """How many times a step was traced, that is, compiled for a new bucket or plan."""
        return self._steps.traces

    @property
    def drains(self) -> int:
        """How many times the pipeline was drained to join, fold, rearrange or suspend."""
        return self._seats.drains

    def join(self, row: Row, prompt: Sequence[Sequence[mx.array]]) -> None:
        """Add a row whose history, but for its last token, was prefilled.

        Args:
            prompt: for every layer what its cache's `write` takes; empty for a one-token history.
        """
        history = row.history
        length = len(history) - 1
        values = {"pending": history[-1], "cursors": length, "body_lengths": length}
        values |= {"accepted": 0, "drafted": 0}
        state = {name: mx.array([value], mx.int32) for name, value in values.items()}
        if row.sampling.penalises:
            state["counts"] = _counts(history, self._model.vocabulary)[None]
        slot = Slot(row, length, length, row.max_tokens - len(row.generated))
        self._enter(slot, Snapshot([list(part) for part in prompt], state))

    def suspend(self, row_id: str) -> bool:
        """Take a row out of its slot for `resume` to put back; False if it is in none.

        What the step in flight yields for it is still read.
        """
        index = self._seats.find(row_id)
        if index is None:
            return False
        self._suspended[row_id] = self._seats.take_out(index)
        # Rows are suspended for others to have their memory, and those are waiting for it.
        self._seats.compact(at_once=True)
        return True

    def resume(self, row_id: str) -> None:
        """Put a suspended row back into a slot."""
        self._enter(*self._suspended.pop(row_id))

    def suspended_bytes(self, row_id: str) -> int:
        suspended = self._suspended.get(row_id)
        return suspended[1].nbytes if suspended else 0

    def leave(self, row_id: str) -> None:
        """Drop a row, suspended or not; what a step in flight still samples for it is dropped."""
        if row_id in self._suspended:
            slot, _ = self._suspended.pop(row_id)
            slot.left = True
            return
        index = self._seats.find(row_id)
        if index is not None:
            self._seats.free(index).left = True

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:
        """Dispatch a step, then read the outcome of the one dispatched before it.

        Args:
            depths: how many tokens to draft for each row, for the next step to judge; rows not
                named, and all rows by default, get as many as they may have.
        """
        if depths is not None and depths != self._depths:
            self._depths = dict(depths)
            self._seats.changed = True
        landed, self._in_flight = self._in_flight, self._dispatch()
        return self._read(landed) if landed else []

    def bytes_for(self, rows: Sequence[tuple[int, int]], *, alone: bool = False) -> int:
        """What the batch will hold at most; see `omlx_worker.engine.interface.Engine`."""
        prompts = sum(self._footprint.of_prompt(to_read) for to_read, _ in rows)
        needs = [longest for _, longest in rows]
        # Rows sit in the slots there are while those do, and else in the fewest.
        layouts = [*reachable(needs), () if alone else grown(self.layout, needs)]
        return prompts + max(self._footprint.of_batch(layout) for layout in layouts)

    def _dispatch(self) -> _Flight | None:
        if all(slot.remaining <= 0 for _, slot in self._seats.taken):
            return None
        self._seats.compact()
        depth = max(self._depth_of(slot.row) for _, slot in self._seats.taken)
        buffers = self._buffers
        buffers.state = fit(buffers.state, buffers.caches, depth, self.depth)
        width = 1 + (buffers.state["drafts"].shape[1] if "drafts" in buffers.state else 0)
        # The window's tokens, and the head's own for every draft but the first.
        reach = width + max(depth - 1, 0)
        if any(slot.offset + reach > TAIL for _, slot in self._seats.taken):
            self._seats.fold()
        if self._seats.changed:
            self._replan()
        step = self._step_for(self._plan, depth)
        verdict, buffers.state, written = step(buffers.state, self._knobs, buffers.arrays)
        for cache, part in zip(buffers.caches, written, strict=True):
            cache.advance(part)
        rows = self._seats.taken
        for _, slot in rows:
            slot.cursor += width
            slot.remaining -= 1
        mx.async_eval(verdict.arrays, buffers.state, written)
        return _Flight(rows, width, verdict)

    def _read(self, flight: _Flight) -> list[RowStep]:
        if all(slot.left for _, slot in flight.rows):
            return []
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

    def _step_for(self, plan: Plan, depth: int) -> CompiledStep:
        def build(on_trace: Callable[[], None]) -> CompiledStep:
            return compiled(self._model, plan, depth, on_trace)

        return self._steps.get((plan, depth, spans_of(self._buffers.caches)), build)

    # Rows, tails and settings: between steps.

    def _enter(self, slot: Slot, snapshot: Snapshot) -> None:
        index = self._seats.place(slot)
        self._replan()
        self._buffers.write(index, snapshot)

    def _replan(self) -> None:
        """Take up the settings of the rows that are there now."""
        slots = self._seats.slots
        rows = [slot.row.sampling if slot else Sampling(temperature=0) for slot in slots]
        depths = [self._depth_of(slot.row) if slot else 0 for slot in slots]
        self._plan = Plan.of(rows, drafts=self.depth > 0)
        self._knobs = knobs(rows, self._plan)
        self._knobs["active"] = mx.array([slot is not None for slot in slots], mx.int32)
        self._knobs["depth"] = mx.array(depths, mx.int32)
        self._seats.changed = False
        self._buffers.keep("counts", self._plan.penalties, (), mx.int32)
        drafts = self._buffers.state.get("drafts")
        if drafts is not None:
            self._buffers.keep("weights", self._plan.ratio, (drafts.shape[1],), mx.float32)


def _counts(tokens: Sequence[int], vocabulary: int) -> mx.array:
    """How often each token of the vocabulary occurs, ``[V]`` int32."""
    return mx.zeros((vocabulary,), mx.int32).at[mx.array(list(tokens), mx.int32)].add(1)
