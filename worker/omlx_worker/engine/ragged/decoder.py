"""The decoder of ragged families: reads prompts in chunks, then decodes their rows in one batch.

A row is its committed tokens, which are in the caches, and one pending token, which is not: the
last token of its history at first, then the token sampled last. A step runs one forward over every
row's window, the pending token and the drafts after it; see `omlx_worker.engine.ragged.step`.
Cursors, pending tokens and drafts stay on the device. A step is dispatched before the last one
lands, or with a constrained row its forward is: the host waits once per step, one step late, and
until then knows only bounds of every cursor.

Shapes are buckets (slots and capacities, window), so a step is traced once per bucket and sampling
plan, not per join.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.batch import Batch, Held, seat_of, slot_of
from omlx_worker.engine.ragged.footprint import Footprint
from omlx_worker.engine.ragged.masks import fill, force
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.reading import Reading, read, vectors_of
from omlx_worker.engine.ragged.sampling import IDLE, Draw, Params, Plan, params, report
from omlx_worker.engine.ragged.step import Halves, fit
from omlx_worker.engine.rows.interface import FIXED_CHUNK, LONGEST_CHUNK
from omlx_worker.engine.rows.row import SOURCES, Cut, Report, Row, RowStep, Size

log = logging.getLogger(__name__)

OVERLAPS = not os.environ.get("OMLX_PLAIN_STEPS")
"""Whether a step is dispatched before the last one lands. Without, for whoever debugs, each lands
before the next."""


@dataclass(slots=True)
class _Flight:
    """A dispatched step.

    Attributes:
        rows: each row's slot in it, the row, and what was held of it. Both may have changed since.
        verdicts: of its `Outcome`.
        draw: the arrays of a `Draw`.
        landed: what it yielded, once it has landed.
    """

    rows: list[tuple[int, Row, Held]]
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
        reads: how often the host has waited for a step.
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
        self.footprint = Footprint(model, self.max_depth, looks_up=self.looks_up, fixed=fixed)
        self._unit = FIXED_CHUNK if fixed else 1
        self._plan = Plan()
        self._params: Params = {}
        self._depth = self.max_depth
        self._in_flight: _Flight | None = None
        self._fitted = -1
        self._halves = Halves(model, self.own_depth)

    @property
    def shares(self) -> bool:
        return self.prefixes is not None

    @property
    def traces(self) -> int:
        """Of steps and of first windows of prompts."""
        return self._halves.traces + self._halves.first_windows.traces

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
        had = chain.from_iterable(row.pages for row in self.rows)
        return self.pages.miscounted(had, self.prefixes.pages if self.prefixes else ())

    # Prompts.

    def add(self, row: Row) -> int:
        """Take a row in; see `Engine.add`."""
        held = self.rows[row] = Held()
        row.computed = row.flying = row.looked = 0
        shared = self._take(row, held)
        if row.cached is None:
            row.cached = min(row.computed, len(row.request.prompt))
        return shared

    def _take(self, row: Row, held: Held) -> int:
        """Take what the prefix cache has of a row; returns what `add` does."""
        unread = row.known(row.shareable)
        if not (self.prefixes and row.request.cache and unread):
            return 0
        salt = row.request.salt
        if self._fixed:
            shared = self.prefixes.shared(unread, salt)
            unread = unread[: shared - shared % self._unit]
        count, pages, layers = self.prefixes.take(unread, salt)
        if count:
            self.share(row, pages, count)
            held.layers, row.computed = layers, count
        return self.prefixes.shared(unread, salt)

    def read(self, tokens: Mapping[Row, int]) -> dict[Row, Report]:
        """Read more of some rows' tokens; see `Engine.read`."""
        readings = [(row, self.rows[row]) for row in tokens]
        lengths = [min(count, row.left) for row, count in tokens.items()]
        if self._fixed:
            for row, held in readings:
                length = self._unit - row.computed % self._unit
                self._read([(row, held)], [row.uncut(min(length, row.left))])
        elif any(lengths):
            self._read(readings, lengths)
        for row, held in readings:
            self._keep(row, held)
        finished = [(row, held) for row, held in readings if not row.left]
        if joining := [row for row, _ in finished if row.remaining > 0]:
            self.join(joining)
        reports: dict[Row, Report] = {}
        if self._model.embedder and finished:
            reports |= vectors_of(finished, self._model.embedder)
        for row, held in finished:
            if row.is_scored:
                reports[row], row.told = held.scored, True
            if row not in self.seated:
                self.leave(row)
        return reports

    def enter(self, row: Row) -> None:
        """Take a row in and read all of it."""
        self.add(row)
        self.read({row: LONGEST_CHUNK})
        while row.left:
            self.read({row: LONGEST_CHUNK})

    def look(self, row: Row) -> None:
        """Let the tower look at the next picture of a row; see `Engine.look`."""
        picture, looks = row.unseen(row.left), self._model.looks
        assert picture
        assert looks
        self.rows[row].seen[picture.start] = looks.vectors_of(picture)
        row.saw(picture)

    def _read(self, readings: Sequence[Reading], lengths: Sequence[int]) -> None:
        for (row, _), length in zip(readings, lengths, strict=True):
            while row.unseen(length):
                self.look(row)
        ends = [(row, row.computed + n) for (row, _), n in zip(readings, lengths, strict=True)]
        self.reserve(ends)
        prefill = None if self._fixed else self._halves.first_windows.prefill
        read(self._model, self.caches, readings, lengths, prefill)

    def _keep(self, row: Row, held: Held) -> None:
        """Keep what is read of a row for others, where they may go on from it."""
        whole = row.computed in row.stops and not row.computed % self._unit
        if self._fixed and row.is_scored:
            whole = False  # its windows may be narrower
        if self.prefixes and row.request.cache and whole:
            known = row.known(row.computed)
            self.prefixes.put(known, row.pages, held.layers, row.request.salt)

    def limit_prefixes(self, room: int) -> None:
        if self.prefixes:
            self.prefixes.limit_to(room)

    def finish(self, row: Row) -> None:
        """Drop a row that has ended, and keep its text for a later prompt that goes on from it."""
        # With fixed shapes a text is no beginning of a prompt, which is read in other windows.
        goes_on = row.request.cache and row.request.goes_on and not self._fixed
        if self.prefixes and row in self.seated and goes_on:
            # States are known after the first token of the last window. That is the one in flight,
            # whose samples nobody wants any more; or, without one, the one that was read last.
            flight, held = self._in_flight, self.rows[row]
            flies = flight and any(other is held for _, _, other in flight.rows)
            length = row.computed - (flight.width - 1 if flight and flies else held.accepted)
            self.fold([row], length)
            layers = [cache.held(seat_of(row), length) for cache in self.caches if not cache.paged]
            self.prefixes.put(row.known(length), row.pages, layers, row.request.salt)
        self.leave(row)

    def _end(self) -> None:
        if self.prefixes:
            self.prefixes.trim()
        super()._end()

    def wait(self) -> None:
        mx.synchronize()

    # Steps.

    def step(self, depth: int | None = None) -> list[RowStep]:
        """Dispatch a step, then land the last one.

        Args:
            depth: tokens to draft for each row that may draft as many, judged by the next step.
                None keeps the depth of the last step. With fixed shapes all rows draft as many as
                they may.
        """
        if depth is not None and depth != self._depth and not self._fixed:
            self._depth = depth
            self.changed = True
        landing, self._in_flight = self._in_flight, self._dispatch(self._in_flight)
        if not OVERLAPS:
            landing, self._in_flight = self._in_flight, None
        steps = self._land(landing) if landing else []
        for row in [row for row in self.seated if self.rows[row].diverged]:
            self._go_on_from_text(row)
        ended: dict[Row, Cut] = {
            row: "slow" if matcher.too_slow else "failed"
            for row in self.seated
            if (matcher := self.rows[row].matcher) and matcher.ended
        }
        # A row without a step gets one without tokens.
        without = ended.keys() - {step.row for step in steps}
        whole = [*steps, *(RowStep(row, []) for row in without)]
        return [replace(step, cut=ended.get(step.row)) for step in whole] if ended else steps

    def _dispatch(self, landing: _Flight | None) -> _Flight | None:
        if all(row.remaining <= 0 for row in self.seated):
            return None
        self.shrink()
        depth = self.max_depth
        if not self._fixed:
            depth = max(self._depth_of(row) for row in self.seated)
        if self.changed or depth != self._fitted:
            self.state = fit(self.state, self.caches, depth, self.max_depth)
            self._fitted = depth
        width = 1 + (self.state["drafts"].shape[1] if "drafts" in self.state else 0)
        # Tail positions of the window, and of what follows it, which a draft model reads.
        self.make_room(width + max(depth, 1))
        if self.changed:
            self._replan()
        rows = [(slot_of(row), row, self.rows[row]) for row in self.seated]
        matchers = {slot: held.matcher for slot, _, held in rows if held.matcher}
        # Tokens of a row, at most, up to the last of its window that the host has not read.
        unread = width + (landing.width if landing else 0)
        nearing = {
            slot: held.thoughts
            for slot, _, held in rows
            if held.thoughts and held.thoughts.nears_budget(unread)
        }
        masked = bool(matchers or nearing)
        # In one order: another is another trace.
        state = dict(sorted(self.state.items()))
        if masked:
            # Before the forward, since the host reads it.
            mx.async_eval(state)
        layers = [cache.arrays for cache in self.caches]
        hidden, written = self._halves.forward(layers, state, depth)
        parts = zip(written, self.caches, strict=True)
        layers = [[*part, *cache.unwritten] for part, cache in parts]
        allowed = forced = None
        if masked:
            mx.async_eval(hidden, written)
            if landing:
                self._land(landing)
            allowed, forced = fill(matchers, nearing, self.vocabulary, state, depth)
        outcome, self.state, written = self._halves.commit(
            layers, state, hidden, self._params, self._plan, depth, allowed
        )
        for cache, part in zip(self.caches, written, strict=True):
            cache.update(part)
        if forced is not None and matchers and depth:
            self.state = force(self.state, forced, self._params["depth"], depth)
        for _, row, _ in rows:
            # A bound: as if all drafts were accepted. `_land` corrects it.
            row.computed += width
            row.flying += 1
        draw = report(outcome.logits, outcome.tokens, [row.sampling for _, row, _ in rows])
        mx.async_eval(outcome.verdicts, draw, self.state, written)
        return _Flight(rows, width, outcome.verdicts, draw)

    def _land(self, flight: _Flight) -> list[RowStep]:
        """What a step yielded. Waits for the device when called first."""
        if flight.landed is not None:
            return flight.landed
        landed = flight.landed = list[RowStep]()
        present = [each for each in flight.rows if self.rows.get(each[1]) is each[2]]
        if not present:
            return landed
        self.reads += 1
        verdicts: Any = flight.verdicts.tolist()
        draw = Draw.of(flight.draw)
        for slot, row, held in present:
            judged, accepted, source = verdicts[slot]
            sampled = [draw.at(row.sampling, slot, place) for place in range(accepted + 1)]
            row.computed -= flight.width - len(sampled)
            row.flying -= 1
            held.accepted = accepted
            tokens = [each.token for each in sampled]
            width, drafter = flight.width - 1, SOURCES[source]
            if not width and held.runs and held.runs.recurs:
                drafter = "lookup"
            held.commit(tokens)
            known = self._repeated(row, held, tokens) if row.again else 0
            row.tokens += tokens[known:]
            if sampled := sampled[known:]:
                landed.append(RowStep(row, sampled, judged, width, drafter))
        return landed

    def _go_on_from_text(self, row: Row) -> None:
        """Read all tokens of a row that does not repeat its text."""
        self.leave(row)
        row.again = 0
        self.enter(row)

    def _repeated(self, row: Row, held: Held, tokens: Sequence[int]) -> int:
        """How many of a step's tokens the row had before."""
        known = row.tokens[row.committed :][: len(tokens)]
        if list(tokens[: len(known)]) != known:
            log.warning(
                "row %s does not repeat its text here: it goes on from the text, which may round "
                "differently",
                row.row_id,
            )
            held.diverged = True
            return len(tokens)
        row.again -= len(known)
        return len(known)

    def _depth_of(self, row: Row) -> int:
        limit = self.max_depth if row.request.depth is None else row.request.depth
        return min(limit, self.max_depth, self._depth)

    def _replan(self) -> None:
        """Collect the settings of the present rows."""
        sampling = [IDLE] * self.slots
        depths, active = [0] * self.slots, [0] * self.slots
        for row in self.seated:
            slot = slot_of(row)
            sampling[slot] = row.sampling
            depths[slot], active[slot] = self._depth_of(row), 1
        self._plan = Plan.of(sampling)
        self._params = params(sampling, self._plan)
        self._params["active"] = mx.array(active, mx.int32)
        self._params["depth"] = mx.array(depths, mx.int32)
        self.hold_needed()
        self.changed = False
