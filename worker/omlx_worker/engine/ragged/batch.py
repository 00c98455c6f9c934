"""The ragged batch: rows in slots, with and without drafts, decoded by one compiled step.

A row is its committed tokens, which are in the caches, and one pending token, which is not: the
last token of its history at first, then the token sampled last. A step runs one forward over every
row's window, the pending token and the drafts after it; see `omlx_worker.engine.ragged.step`.
Cursors, pending tokens and drafts stay on the device. A step is dispatched before the last one is
read, or with a constrained row its forward is: the host reads once per step, one step late, and
until then knows only bounds of every cursor.

Shapes are buckets (slots and capacities, window), so a step is traced once per bucket and sampling
plan, not per join; `omlx_worker.engine.ragged.slots` says which row has which slot. A suspended
row leaves the batch with all its arrays and can be resumed later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.caches.layout import Layout, grown, reachable
from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.buffers import Snapshot, counts_of
from omlx_worker.engine.ragged.footprint import Footprint, RowBytes
from omlx_worker.engine.ragged.lookups import history_of
from omlx_worker.engine.ragged.masks import Masks, Matcher
from omlx_worker.engine.ragged.sampling import Draw, Params, Plan, params, report
from omlx_worker.engine.ragged.slots import Slot, Slots
from omlx_worker.engine.ragged.step import Arrays, Cut, RowStep, Verdict, cut, fit
from omlx_worker.engine.ragged.steps import Steps
from omlx_worker.engine.rows.row import Row, Sampling


@dataclass(slots=True)
class _Flight:
    """A dispatched step.

    Attributes:
        rows: with their indices in the outcome; their slots may have changed since.
        counts, draw: what `Verdict` reads.
        steps: what it yielded, once it is read.
    """

    rows: list[tuple[int, Slot]]
    width: int
    counts: mx.array
    draw: Draw
    steps: list[RowStep] | None = None


class Batch:
    """The rows being decoded on one model.

    Args:
        depth: drafts of a row and step, at most, that the model makes itself.
        lookup: the same of those that are looked up; 0 for none.

    Attributes:
        depth: drafts per row and step, at most; a row may have a lower limit.
        own_depth: of those that the model makes itself; the others are looked up.
        reads: how many outcomes the host has read.
    """

    def __init__(self, model: RaggedModel, depth: int = 0, lookup: int = 0) -> None:
        self.own_depth = depth if model.drafts else 0
        self.depth = max(lookup, self.own_depth)
        self.looks_up = lookup > 0
        self.reads = 0
        self.weight_bytes = model.weight_bytes
        self._model = model
        self._slots = Slots(model, looks_up=self.looks_up)
        self._buffers = self._slots.buffers
        self._footprint = Footprint(model, self.depth, looks_up=self.looks_up)
        self._suspended: dict[str, tuple[Slot, Snapshot]] = {}
        self._plan = Plan()
        self._params: Params = {}
        self._depths: Mapping[str, int] = {}
        self._steps = Steps(model, self.own_depth)
        self._in_flight: _Flight | None = None

    @property
    def slots(self) -> int:
        return len(self._slots.rows)

    @property
    def layout(self) -> Layout:
        return self._buffers.layout

    @property
    def traces(self) -> int:
        """How many times a step was compiled for a new bucket or plan."""
        return self._steps.traces

    @property
    def changes(self) -> int:
        return self.traces + self.drains

    @property
    def drains(self) -> int:
        """How many times the pipeline was drained to join, fold, rearrange or suspend."""
        return self._slots.drains

    def join(self, rows: Sequence[tuple[Row, Arrays]]) -> None:
        """Add rows. Their histories but for the last tokens are prefilled.

        Args:
            rows: each with what the layers hold of it; nothing for a one-token history.
        """
        self._enter([self._joining(row, prompt) for row, prompt in rows])

    def _joining(self, row: Row, layers: Arrays) -> tuple[Slot, Snapshot]:
        history = row.history
        length = len(history) - 1
        values = {"pending": history[-1], "cursors": length, "body_lengths": length}
        values |= {"accepted": 0, "drafted": 0, "source": 0}
        state = {name: mx.array([value], mx.int32) for name, value in values.items()}
        if self.looks_up:
            state["history"] = history_of(history)
        if row.sampling.penalises:
            state["counts"] = counts_of(history, self._model.vocabulary)[None]
        slot = Slot(row, history, length, length, row.max_tokens - len(row.generated))
        if row.grammar is not None:
            slot.matcher = Matcher(row.grammar, row.generated)
        return slot, Snapshot(layers, state)

    def suspend(self, row_id: str) -> bool:
        """Take a row out of its slot until `resume`; False if it has none.

        The next `step` still returns what the step in flight yields for it.
        """
        index = self._slots.find(row_id)
        if index is None:
            return False
        self._suspended[row_id] = self._slots.take_out(index)
        # Others wait for the memory that this frees.
        self._slots.compact(at_once=True)
        return True

    def resume(self, row_id: str) -> None:
        """Put a suspended row back into a slot."""
        self._enter([self._suspended.pop(row_id)])

    def suspended_bytes(self, row_id: str) -> int:
        suspended = self._suspended.get(row_id)
        return suspended[1].nbytes if suspended else 0

    def leave(self, row_id: str) -> None:
        """Drop a row, suspended or not, and the samples of the step in flight for it."""
        if row_id in self._suspended:
            slot, _ = self._suspended.pop(row_id)
            slot.left = True
            return
        index = self._slots.find(row_id)
        if index is not None:
            self._slots.free(index).left = True

    def text_so_far(self, row_id: str) -> tuple[list[int], Arrays]:
        """The tokens of a row whose states are known, and what the layers hold of them.

        They are the committed ones and the first of the step in flight, whose samples nobody wants
        any more; or, without one, those up to the first of the last window.
        """
        index = self._slots.find(row_id)
        assert index is not None
        slot = self._slots.at(index)
        in_flight = self._width_in_flight(slot)
        length = slot.cursor - in_flight + 1 if in_flight else slot.cursor - slot.accepted
        self._slots.drain()
        return slot.tokens[:length], self._buffers.beginning(index, slot.body_length, length)

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:
        """Dispatch a step, then read the outcome of the last one.

        Args:
            depths: tokens to draft for each row, judged by the next step; rows not named draft
                as many as they may. None keeps the depths of the last step.
        """
        if depths is not None and depths != self._depths:
            self._depths = dict(depths)
            self._slots.changed = True
        landed, self._in_flight = self._in_flight, self._dispatch(self._in_flight)
        steps = self._read(landed) if landed else []
        ended: dict[str, Cut] = {
            slot.row.row_id: "slow" if slot.matcher.slow else "failed"
            for _, slot in self._slots.taken
            if slot.matcher and slot.matcher.ended
        }
        return cut(steps, ended) if ended else steps

    @property
    def row_bytes(self) -> RowBytes:
        return self._footprint.of_row

    def bytes_for(self, rows: Sequence[tuple[int, int]], *, alone: bool = False) -> int:
        """See `omlx_worker.engine.rows.interface.Rows`."""
        prompts = self._footprint.of_prompts([to_read for to_read, _ in rows])
        # A row's last step may commit drafts beyond its end before the host has read it.
        needs = [longest + max(0, self.depth - 1) for _, longest in rows]
        # Rows use the present layout as long as it suffices, then the smallest one.
        layouts = [*reachable(needs), () if alone else grown(self.layout, needs)]
        batch = max(self._footprint.of_batch(layout) for layout in layouts)
        return prompts + batch + self._footprint.of_histories(layouts)

    def _dispatch(self, landed: _Flight | None) -> _Flight | None:
        if all(slot.remaining <= 0 for _, slot in self._slots.taken):
            return None
        self._slots.compact()
        depth = max(self._depth_of(slot.row) for _, slot in self._slots.taken)
        buffers = self._buffers
        buffers.state = fit(buffers.state, buffers.caches, depth, self.depth)
        width = 1 + (buffers.state["drafts"].shape[1] if "drafts" in buffers.state else 0)
        # Tail positions of the window, and of what follows it, which a draft model reads.
        reach = width + max(depth, 1)
        if any(slot.offset + reach > TAIL for _, slot in self._slots.taken):
            self._slots.fold()
        if self._slots.changed:
            self._replan()
        before, plan = buffers.state, self._plan
        masked = [(index, slot.matcher) for index, slot in self._slots.taken if slot.matcher]
        masks = Masks(masked, self._model.vocabulary)

        def fill() -> mx.array:
            if landed:
                self._read(landed)
            return masks.fill(before, depth)

        outcome = self._steps.run(buffers, self._params, plan, depth, fill if masked else None)
        if masked:
            limits = self._params["depth"]
            buffers.state = masks.force(buffers.state, limits, depth, ratio=plan.ratio)
        rows = self._slots.taken
        for _, slot in rows:
            # Bounds: as if all drafts were accepted, and as if none were. `_landed` corrects them.
            slot.cursor += width
            slot.remaining -= 1
        draw = report(outcome.logits, outcome.tokens, [slot.row.sampling for _, slot in rows])
        mx.async_eval(outcome.counts, draw.arrays, buffers.state, buffers.written)
        return _Flight(rows, width, outcome.counts, draw)

    def _read(self, flight: _Flight) -> list[RowStep]:
        """What a step yielded. Waits for the device when called first."""
        if flight.steps is None:
            flight.steps = self._landed(flight)
        return flight.steps

    def _landed(self, flight: _Flight) -> list[RowStep]:
        if all(slot.left for _, slot in flight.rows):
            return []
        self.reads += 1
        verdict = Verdict(flight.counts, flight.draw)
        steps = []
        for index, slot in flight.rows:
            if slot.left:
                continue
            step = verdict.at(slot.row, index)
            slot.cursor -= flight.width - len(step.tokens)
            slot.remaining -= step.accepted
            slot.accepted = step.accepted
            tokens = [sampled.token for sampled in step.tokens]
            slot.tokens += tokens
            if slot.matcher:
                slot.matcher.commit(tokens)
            steps.append(step)
        return steps

    def _width_in_flight(self, slot: Slot) -> int:
        """Of the step in flight, if the row is in it; else 0."""
        flight = self._in_flight
        return flight.width if flight and any(s is slot for _, s in flight.rows) else 0

    def _depth_of(self, row: Row) -> int:
        limit = self.depth if row.depth is None else min(self.depth, row.depth)
        return min(limit, self._depths.get(row.row_id, limit))

    # Between steps.

    def _enter(self, rows: Sequence[tuple[Slot, Snapshot]]) -> None:
        indices = self._slots.place([slot for slot, _ in rows])
        self._replan()
        for index, (_, snapshot) in zip(indices, rows, strict=True):
            self._buffers.write(index, snapshot)
        self._buffers.settle()

    def _replan(self) -> None:
        """Collect the settings of the present rows."""
        slots = self._slots.rows
        rows = [slot.row.sampling if slot else Sampling(temperature=0) for slot in slots]
        depths = [self._depth_of(slot.row) if slot else 0 for slot in slots]
        self._plan = Plan.of(rows, drafts=self.depth > 0)
        self._params = params(rows, self._plan)
        self._params["active"] = mx.array([slot is not None for slot in slots], mx.int32)
        self._params["depth"] = mx.array(depths, mx.int32)
        self._slots.changed = False
        self._buffers.keep("counts", self._plan.penalties, (), mx.int32)
        drafts = self._buffers.state.get("drafts")
        if drafts is not None:
            self._buffers.keep("weights", self._plan.ratio, (drafts.shape[1],), mx.float32)
