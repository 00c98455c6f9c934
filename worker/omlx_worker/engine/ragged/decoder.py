"""The decoder of ragged families: reads prompts in chunks, then decodes their rows in one batch.

A row is its committed tokens, which are in the caches, and one pending token, which is not: the
last token of its history at first, then the token sampled last. A step runs one forward over every
row's window, the pending token and the drafts after it; see `omlx_worker.engine.ragged.step`.
Cursors, pending tokens and drafts stay on the device. A step is dispatched before the last one is
read, or with a constrained row its forward is: the host reads once per step, one step late, and
until then knows only bounds of every cursor.

Shapes are buckets (slots and capacities, window), so a step is traced once per bucket and sampling
plan, not per join.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch, BatchRow
from omlx_worker.engine.ragged.footprint import Footprint
from omlx_worker.engine.ragged.masks import fill, force
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.reading import Reading, read, vectors_of
from omlx_worker.engine.ragged.sampling import (
    Draw,
    Params,
    Plan,
    params,
    report,
)
from omlx_worker.engine.ragged.step import Halves, fit
from omlx_worker.engine.rows.interface import FIXED_CHUNK, Size
from omlx_worker.engine.rows.row import SOURCES, Cut, Known, Report, Row, RowStep, Sampling


@dataclass(slots=True)
class _Flight:
    """A dispatched step.

    Attributes:
        rows: with their slots in it; they may have other ones since.
        verdicts: of its `Outcome`.
        draw: the arrays of a `Draw`.
        landed: what it yielded, once it is read.
    """

    rows: list[tuple[int, BatchRow]]
    width: int
    verdicts: mx.array
    draw: list[mx.array]
    landed: list[RowStep] | None = None


class RaggedDecoder(Batch):
    """The ragged batch, and the rows whose prompts are being read for it.

    Args:
        depth: drafts of a row and step, at most, that the model makes itself.
        lookup: the same of those that are looked up; 0 for none.
        make_prefixes: makes what keeps beginnings of prompts for other rows, in the pool that it is
            given; None to keep none.
        fixed: with any number but 0, fixed shapes: every step has this many slots and
            `max_depth` drafts, and every prompt is read alone, in chunks that begin at the same
            positions of any prompt. The model's forms must be those of a `Contest` that is fixed.
            Then the numbers of a row depend on nothing but the row.

    Attributes:
        max_depth: drafts per row and step, at most; a row may have a lower limit.
        own_depth: of those that the model makes itself; the others are looked up.
        vocabulary: entries of the logits.
        prefixes: what `make_prefixes` made.
        reads: how many outcomes the host has read.
    """

    def __init__(
        self,
        model: RaggedModel,
        depth: int = 0,
        lookup: int = 0,
        make_prefixes: Callable[[RaggedDecoder], PrefixCache] | None = None,
        fixed: int = 0,
    ) -> None:
        self.own_depth = depth if model.drafter else 0
        self.max_depth = max(lookup, self.own_depth)
        super().__init__(model, looks_up=lookup > 0, fixed=fixed, depth=self.max_depth)
        self.reads = 0
        self.weight_bytes, self.vocabulary = model.weight_bytes, model.vocabulary
        self.pads, self.slow_parts = model.pads, model.slow_parts
        self.prefixes = make_prefixes(self) if make_prefixes else None
        self._reading: dict[str, Reading] = {}
        self._reports: dict[str, Report] = {}
        self.footprint = Footprint(model, self.max_depth, looks_up=self.looks_up, fixed=fixed)
        self._unit = FIXED_CHUNK if fixed else 1
        self._plan = Plan()
        self._params: Params = {}
        self._depths: Mapping[str, int] = {}
        self._in_flight: _Flight | None = None
        self._halves = Halves(model, self.own_depth)

    @property
    def shares(self) -> bool:
        return self.prefixes is not None

    @property
    def traces(self) -> int:
        """Of steps and of first windows of prompts."""
        return self._halves.traces + self._halves.first_windows.traces

    @property
    def stalls(self) -> int:
        return self.traces + self.drains

    def keep_within(self, limit: int) -> None:
        self.layout = self.empty = self.footprint.empty(limit - self.weight_bytes)

    def bytes_for(self, rows: Sequence[Size], *, alone: bool = False) -> int:
        return (
            self.footprint.of_rows(rows, self.empty)
            if alone
            else self.footprint.of_rows(
                rows, self.layout, self.suspended_pages + self.pages.alone, self.pages.saved
            )
        )

    def miscounted_pages(self) -> int:
        """How many pages of the pool other rows or nodes have than are counted."""
        rows = [row.pages for rows in (self.rows, self.suspended) for row in rows.values()]
        rows += [row.pages for row in self._reading.values()]
        return self.pages.miscounted(chain(*rows), self.prefixes.pages if self.prefixes else ())

    # Prompts.

    def add(self, row: Row) -> Known:
        reading = self._reading[row.row_id] = Reading(row, row.history)
        unread = reading.history[: row.shareable]
        if not (self.prefixes and row.cache and unread):
            return Known(left=reading.left)
        if self._fixed:
            shared = self.prefixes.shared(unread, row.salt)
            unread = unread[: shared - shared % self._unit]
        held, pages, layers = self.prefixes.take(unread, row.salt)
        if held:
            self.share(reading.pages, pages, held)
            reading.states, reading.done = layers, held
        return Known(held, self.prefixes.shared(unread, row.salt), reading.left)

    def _read(self, readings: Sequence[Reading], lengths: Sequence[int]) -> None:
        ends = [(r.pages, r.done + n) for r, n in zip(readings, lengths, strict=True)]
        self.reserve(ends)
        prefill = None if self._fixed else self._halves.first_windows.prefill
        read(self._model, self.caches, readings, lengths, prefill)

    def prefill(self, tokens: Mapping[str, int], keep: Collection[str] = ()) -> dict[str, int]:
        readings = [self._reading[row_id] for row_id in tokens]
        lengths = [min(tokens[reading.row_id], reading.left) for reading in readings]
        if self._fixed:
            for reading in readings:
                length = self._unit - reading.done % self._unit
                self._read([reading], [min(length, reading.left)])
        elif any(lengths):
            self._read(readings, lengths)
        for row_id in keep:
            reading = self._reading[row_id]
            whole = reading.done and not reading.done % self._unit
            if self._fixed and reading.is_scored:
                whole = False  # its windows may be narrower
            if self.prefixes and reading.request.cache and whole:
                known = reading.history[: reading.done]
                self.prefixes.put(known, reading.pages, reading.states, reading.request.salt)
        finished = [reading for reading in readings if not reading.left]
        if joining := [reading for reading in finished if reading.request.max_tokens]:
            self.join([(reading.request, reading.pages, reading.states) for reading in joining])
        for reading in finished:
            if reading.is_scored:
                self._reports[reading.row_id] = reading.scored
            if not reading.request.max_tokens:
                self.release(reading.pages)
            del self._reading[reading.row_id]
        if self._model.embedder and finished:
            self._reports |= vectors_of(finished, self._model.embedder)
        return {reading.row_id: reading.left for reading in readings}

    def take_reports(self) -> dict[str, Report]:
        taken, self._reports = self._reports, {}
        return taken

    def limit_prefixes(self, room: int) -> None:
        if self.prefixes:
            self.prefixes.limit_to(room)

    def remove(self, row_id: str) -> None:
        # A row whose joining failed may be in both.
        if reading := self._reading.pop(row_id, None):
            self.release(reading.pages)
        self._reports.pop(row_id, None)
        self.leave(row_id)

    def finish(self, row_id: str) -> None:
        row = self.rows.get(row_id)
        # With fixed shapes a text is no beginning of a prompt, which is read in other windows.
        goes_on = row and row.request.cache and row.request.goes_on and not self._fixed
        if self.prefixes and row and goes_on:
            # States are known after the first token of the last window. That is the one in flight,
            # whose samples nobody wants any more; or, without one, the one that was read last.
            flight = self._in_flight
            flies = flight and any(other is row for _, other in flight.rows)
            length = row.cursor - (flight.width - 1 if flight and flies else row.accepted)
            self.fold([row], length)
            layers = [cache.held(row.seat, length) for cache in self.caches if not cache.paged]
            self.prefixes.put(row.tokens[:length], row.pages, layers, row.request.salt)
        self.remove(row_id)

    def _end(self) -> None:
        if self.prefixes:
            self.prefixes.trim()
        super()._end()

    def wait(self) -> None:
        mx.synchronize()

    # Steps.

    def step(self, depths: Mapping[str, int] | None = None) -> list[RowStep]:
        """Dispatch a step, then read the outcome of the last one.

        Args:
            depths: tokens to draft for each row, judged by the next step; rows not named draft
                as many as they may. None keeps the depths of the last step. With fixed shapes all
                rows draft as many as they may.
        """
        if depths is not None and depths != self._depths and not self._fixed:
            self._depths = dict(depths)
            self.changed = True
        landing, self._in_flight = self._in_flight, self._dispatch(self._in_flight)
        steps = self._land(landing) if landing else []
        ended: dict[str, Cut] = {
            row.row_id: "slow" if row.matcher.too_slow else "failed"
            for row in self.rows.values()
            if row.matcher and row.matcher.ended
        }
        # A row without a step gets one without tokens.
        without = ended.keys() - {step.row_id for step in steps}
        whole = [*steps, *(RowStep(row_id, []) for row_id in without)]
        return [replace(step, cut=ended.get(step.row_id)) for step in whole] if ended else steps

    def _dispatch(self, landing: _Flight | None) -> _Flight | None:
        if all(row.remaining <= 0 for row in self.rows.values()):
            return None
        self.shrink()
        depth = self.max_depth
        if not self._fixed:
            depth = max(self._depth_of(row.request) for row in self.rows.values())
        self.state = fit(self.state, self.caches, depth, self.max_depth)
        width = 1 + (self.state["drafts"].shape[1] if "drafts" in self.state else 0)
        # Tail positions of the window, and of what follows it, which a draft model reads.
        self.make_room(width + max(depth, 1))
        if self.changed:
            self._replan()
        rows = [(row.slot, row) for row in self.rows.values()]
        matchers = {slot: row.matcher for slot, row in rows if row.matcher}
        # Tokens of a row, at most, up to the last of its window that the host has not read.
        unread = width + (landing.width if landing else 0)
        nearing = {
            slot: row.thoughts
            for slot, row in rows
            if row.thoughts and row.thoughts.nears_budget(unread)
        }
        masked = bool(matchers or nearing)
        # In one order: another is another trace.
        state = dict(sorted(self.state.items()))
        if masked:
            # Before the forward, since the host reads it.
            mx.async_eval(state)
        hidden, written = self._halves.forward(self.caches, state, depth)
        allowed = forced = None
        if masked:
            mx.async_eval(hidden, written)
            if landing:
                self._land(landing)
            allowed, forced = fill(matchers, nearing, self.vocabulary, state, depth)
        outcome, self.state, written = self._halves.commit(
            self.caches, state, hidden, self._params, self._plan, depth, allowed
        )
        if forced is not None and matchers and depth:
            self.state = force(self.state, forced, self._params["depth"], depth)
        for _, row in rows:
            # Bounds: as if all drafts were accepted, and as if none were. `_land` corrects them.
            row.cursor += width
            row.remaining -= 1
        draw = report(outcome.logits, outcome.tokens, [row.request.sampling for _, row in rows])
        mx.async_eval(outcome.verdicts, draw, self.state, written)
        return _Flight(rows, width, outcome.verdicts, draw)

    def _land(self, flight: _Flight) -> list[RowStep]:
        """What a step yielded. Waits for the device when called first."""
        if flight.landed is not None:
            return flight.landed
        landed: list[RowStep] = []
        if all(row.gone for _, row in flight.rows):
            return landed
        self.reads += 1
        verdicts: Any = flight.verdicts.tolist()
        draw = Draw.of(flight.draw)
        for slot, row in flight.rows:
            if row.gone:
                continue
            judged, accepted, source = verdicts[slot]
            sampled = [draw.at(row.request, slot, place) for place in range(accepted + 1)]
            row.cursor -= flight.width - len(sampled)
            row.remaining -= accepted
            row.accepted = accepted
            tokens = [each.token for each in sampled]
            row.tokens += tokens
            width, drafter = flight.width - 1, SOURCES[source]
            if not width and row.runs and row.runs.recurs:
                drafter = "lookup"
            for follower in (row.matcher, row.thoughts, row.runs):
                if follower:
                    follower.commit(tokens)
            landed.append(RowStep(row.row_id, sampled, judged, width, drafter))
        flight.landed = landed
        return landed

    def _depth_of(self, row: Row) -> int:
        limit = self.max_depth if row.depth is None else min(self.max_depth, row.depth)
        return min(limit, self._depths.get(row.row_id, limit))

    def _replan(self) -> None:
        """Collect the settings of the present rows."""
        sampling = [Sampling(temperature=0)] * self.slots
        depths, active = [0] * self.slots, [0] * self.slots
        for row in self.rows.values():
            sampling[row.slot] = row.request.sampling
            depths[row.slot], active[row.slot] = self._depth_of(row.request), 1
        self._plan = Plan.of(sampling)
        self._params = params(sampling, self._plan)
        self._params["active"] = mx.array(active, mx.int32)
        self._params["depth"] = mx.array(depths, mx.int32)
        self.hold_needed()
        self.changed = False
