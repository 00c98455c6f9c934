"""The rows of a ragged batch: which row has which slot and pages, and the arrays behind them.

A row has pages from the first token of its prompt to its end. It takes a slot when it joins and
frees it when it leaves. Slots and pages move only between steps, with the pipeline drained: when
they do not suffice, and when the batch has been too large for a while. MLX updates a buffer in
place only while nothing in flight holds it, so all that writes to caches here drains first.

A suspended row keeps its pages, and takes what else layers hold of it along until it is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from omlx_worker.engine.caches.layout import (
    Layout,
    Pages,
    Seat,
    excess,
    indices,
    layout_for,
    pages_for,
    pages_in,
    unmoved,
)
from omlx_worker.engine.caches.recurrent_cache import RecurrentCache, widened
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window, entries_of, own_pages, table_of
from omlx_worker.engine.models.ragged_model import LayerCache, Layers, RaggedModel
from omlx_worker.engine.ragged.lookups import BEFORE_OWN, SHORTEST, Runs, history_length
from omlx_worker.engine.ragged.masks import Matcher
from omlx_worker.engine.ragged.state import (
    State,
    clear,
    empty_state,
    first_state,
    moved,
    part_of,
    without_pages,
    write,
)
from omlx_worker.engine.rows.page import Page
from omlx_worker.engine.rows.row import Row, Scored
from omlx_worker.engine.rows.thinking import Thoughts

SHRINK_AFTER = 32
"""Steps with twice the slots or capacity that rows need before the batch shrinks (hysteresis).
A larger excess shrinks sooner: eight times the need after a seventh of these steps."""


@dataclass(eq=False, slots=True)
class Held:
    """Arrays of a row while it has no slot, and what follows its tokens while it decodes.

    Attributes:
        layers: its part of every layer's cache besides pages, while it has no slot; none before
            its first token.
        state: likewise of the step's state, ``[1, ...]``, while it is suspended.
        body_length: tokens in the bodies, once it has joined; those after them are in its tail.
        accepted: drafts that its last step to land has accepted.
        diverged: whether its steps do not repeat its text, from which it goes on once it has a
            slot.
        scored: the tokens of its prompt from the second on, or its targets, as far as it is read,
            if they are to be scored.
        seen: vectors of pictures that were looked at and are not read yet, by their starts.
        pooled: ``[hidden]`` float32, what `Embedder.pool` gave for the tokens that are read.
        matcher: of a constrained row; knows the tokens that the host has read.
        thoughts: likewise of a row whose model marks its thinking.
        runs: likewise where drafts are looked up.
    """

    layers: Layers = field(default_factory=list)
    state: State = field(default_factory=dict)
    body_length: int = 0
    accepted: int = 0
    diverged: bool = False
    scored: list[Scored] = field(default_factory=list)
    seen: dict[int, mx.array] = field(default_factory=dict)
    pooled: mx.array | None = None
    matcher: Matcher | None = None
    thoughts: Thoughts | None = None
    runs: Runs | None = None

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        arrays = [array for layer in self.layers for array in layer]
        return sum(array.nbytes for array in [*arrays, *self.state.values()])

    def commit(self, tokens: list[int]) -> None:
        """Let what follows the row's tokens know those that it has committed."""
        for follower in (self.matcher, self.thoughts, self.runs):
            if follower:
                follower.commit(tokens)


class Batch:
    """Rows in slots.

    Args:
        looks_up: whether drafts are looked up.
        fixed: slots of every step, with or without rows; 0 for as many as rows need.
        depth: drafts of every step then.

    Attributes:
        rows: those that were added, and what is held of each besides pages.
        seated: those in slots.
        layout: its slots and pages.
        empty: the layout without rows. Any other has as many pages at least.
        pages: those of the layout: which rows have them, with slots or without, and which are kept.
        caches: one a layer, the head's after the backbone's; none while nobody has pages or a slot.
        state: see `omlx_worker.engine.ragged.state`.
        drains: how many times the pipeline was drained to join, fold, rearrange or suspend.
        changed: whether rows have joined, left or moved; the caller resets it.
    """

    def __init__(
        self, model: RaggedModel, *, looks_up: bool = False, fixed: int = 0, depth: int = 0
    ) -> None:
        self.rows: dict[Row, Held] = {}
        self.seated: list[Row] = []
        self.layout = self.empty = Layout()
        self.pages = Pages()
        self.caches: list[LayerCache] = []
        self.state: State = {}
        self.looks_up = looks_up
        self.drains = 0
        self.changed = False
        self._model = model
        self._fixed, self._depth = fixed, depth
        self._slack = 0

    @property
    def slots(self) -> int:
        return self.layout.slots if self.seated else 0

    def join(self, rows: Sequence[Row]) -> None:
        """Give slots to rows that are read but for their last tokens."""
        for row in rows:
            self._begin_decoding(row, self.rows[row])
        self._enter(rows)

    def _begin_decoding(self, row: Row, held: Held) -> None:
        held.body_length = row.computed
        held.state = first_state(row, self._model.vocabulary, looks_up=self.looks_up)
        request, tokens = row.request, row.tokens[: row.committed]
        text = tokens[len(request.prompt) :]
        if self.looks_up:
            held.runs = Runs(tokens, BEFORE_OWN if self._model.drafter else SHORTEST)
        if request.grammar is not None:
            held.matcher = Matcher(request.grammar, text)
        if row.sampling.thinking:
            held.thoughts = Thoughts(row.sampling.thinking, text)

    def _enter(self, joining: Sequence[Row]) -> None:
        """Give rows slots, and write their arrays there."""
        self._drain()
        self._seat(joining)
        self.seated += joining
        self.changed = True
        self.hold_needed()
        for row in joining:
            self._write(row, self.rows[row])
        self._settle()

    def suspend(self, row: Row) -> None:
        """Take a row out of its slot until `resume`; `Row.kept_bytes` says what it has meanwhile.

        The next step still returns what the step in flight yields for it.
        """
        held = self.rows[row]
        self.fold([row])
        held.layers = [cache.copy(slot_of(row)) for cache in self.caches]
        held.state = part_of(self.state, slot_of(row), counts=row.sampling.penalises)
        mx.eval(held.layers, held.state)
        self._free(row)
        # Others wait for the memory that this frees.
        self.shrink(at_once=True)
        page_bytes = sum(cache.page_bytes for cache in self.caches)
        row.kept_bytes = held.nbytes + len(row.pages) * page_bytes

    def resume(self, row: Row) -> None:
        """Put a suspended row back into a slot."""
        self._enter([row])

    @property
    def suspended_pages(self) -> int:
        """How many pages suspended rows have. From any thread."""
        return sum(len(row.pages) for row, held in list(self.rows.items()) if held.state)

    def leave(self, row: Row) -> None:
        """Drop a row, in a slot or not, and the samples of the step in flight for it."""
        if self.rows.pop(row, None) is None:
            return
        self.release(row)
        if row in self.seated:
            self._free(row)

    def make_room(self, positions: int) -> None:
        """Move every tail to its body if one of them has no room for ``positions`` more."""
        if any(self._in_tail(row) + positions > TAIL for row in self.seated):
            self.fold(self.seated)

    def _in_tail(self, row: Row) -> int:
        """Positions in a row's tail, at most."""
        return row.computed - self.rows[row].body_length

    def share(self, row: Row, pages: Sequence[Page], length: int) -> None:
        """Give a row without pages those that have its first ``length`` tokens. It writes to none
        of them: a page that has room for more tokens is copied.
        """
        whole = length // PAGE
        row.pages += self.pages.lend(pages[:whole])
        self.reserve([(row, length)])
        begun, copied = (indices(part[whole:]) for part in (pages, row.pages))
        for cache in self.caches if begun else []:
            cache.copy_pages(begun, copied)

    def reserve(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Give rows pages. Waits for the step in flight, so that pages can be written to in place.

        Args:
            rows: each with the positions that it needs room for.
        """
        self._settle()
        missing = [max(0, pages_for(length) - len(row.pages)) for row, length in rows]
        used = self.pages.used + sum(missing)
        if not self.caches:
            self._begin()
        if used > self.pages.size:
            self._resize(pages_in(used))
        for (row, _), count in zip(rows, missing, strict=True):
            row.pages += self.pages.take(count)

    def release(self, row: Row) -> None:
        """Take a row's pages back; with the last row go its arrays, but for pages that are kept."""
        self.pages.release(row.pages)
        self._end()

    def fold(self, rows: Sequence[Row], end: int | None = None) -> None:
        """Move the tails of rows to their bodies.

        Args:
            end: the position up to which they are moved; None for the cursors.
        """
        self._drain()
        cursors: list[int] = self.state["cursors"].tolist()  # type: ignore[assignment]
        ends = [cursors[slot_of(row)] if end is None else end for row in rows]
        self.reserve(list(zip(rows, ends, strict=True)))
        self._seat()
        bodies = [self.rows[row] for row in rows]
        tails = [
            (seat_of(row), body.body_length, end)
            for row, body, end in zip(rows, bodies, ends, strict=True)
        ]
        for cache in self.caches:
            cache.fold(tails)
            # One layer at a time: what moves is held twice.
            mx.eval(cache.arrays)
        lengths = mx.array(ends, mx.int32)
        self.state["body_lengths"][mx.array([slot_of(row) for row in rows])] = lengths
        for body, end in zip(bodies, ends, strict=True):
            body.body_length = end

    def shrink(self, *, at_once: bool = False) -> None:
        """Shrink the batch if it has been too large for a while; called once a step.

        Args:
            at_once: do not wait.
        """
        if not self.seated:
            return
        # The next fold may need as many.
        longest = [max(len(row.pages), pages_for(row.computed)) for row in self.seated]
        used = self.pages.used + sum(longest) - sum(len(row.pages) for row in self.seated)
        needed = layout_for(self._fixed or len(self.seated), used, max(longest), self.empty)
        too_large = excess(self.layout, needed)
        self._slack = self._slack + too_large if too_large else 0
        if too_large and (at_once or self._slack >= SHRINK_AFTER):
            self._drain()
            self._seat(least=needed)
            self._slack = 0

    def hold_needed(self) -> None:
        """Hold the counts of penalties only while a row needs them."""
        if not any(row.sampling.penalises for row in self.seated):
            self.state.pop("counts", None)
        elif "counts" not in self.state:
            self.state["counts"] = mx.zeros((self.slots, self._model.vocabulary), mx.int32)

    def _drain(self) -> None:
        """Wait for the step in flight, so that only the caches hold their buffers."""
        if self.seated:
            self.drains += 1
            self._settle()

    def _settle(self) -> None:
        mx.eval([cache.arrays for cache in self.caches], self.state)

    def _free(self, row: Row) -> None:
        """Free a row's slot."""
        self.seated.remove(row)
        self.changed = True
        clear(self.state, slot_of(row))
        row.slot = None
        self._end()

    def _end(self) -> None:
        """Drop all arrays that nobody has any part of, once no row is left."""
        if self.seated or self.pages.used > self.pages.alone:
            return
        self._slack = 0
        if self.pages.used:
            self._begin()
        else:
            self.caches, self.state, self.layout = [], {}, self.empty
            self.pages.resize(0)

    def _write(self, row: Row, held: Held) -> None:
        """Write a row's arrays to its slot."""
        for cache, part in zip(self.caches, held.layers or [[]] * len(self.caches), strict=True):
            cache.write(seat_of(row), part)
        write(self.state, slot_of(row), held.state)
        held.layers, held.state = [], {}

    def _begin(self) -> None:
        """Make the arrays of a batch without rows, but for the pages that there are."""
        slots, pool = self._fixed or 1, self.caches
        self.layout = layout_for(slots, self.pages.size, 0, self.empty)._replace(slots=slots)
        self.caches = self._model.new_caches(slots, self.layout.capacity)
        if pool:
            for cache, old in zip(self.caches, pool, strict=True):
                cache.take_pool(old)
        else:
            self.pages.resize(slots * self.layout.capacity // PAGE)
        if self.pages.size < self.layout.pages:
            self._resize(self.layout.pages)
        self.state = empty_state(slots, history_length(self.layout) if self.looks_up else 0)
        if self._fixed and self._depth:
            self._leave_drafts(self._fixed, self._depth)

    def _resize(self, pages: int) -> None:
        """Change the size of the pool."""
        kept = self.pages.resize(pages)
        for cache in self.caches:
            cache.resize(kept, pages)
            # One layer at a time, so that only one layer's old buffers are held beside the new.
            mx.eval(cache.arrays)
        self.layout = self.layout._replace(pages=pages)
        # Otherwise freed buffers of old shapes pile up in a worker that runs for days.
        mx.clear_cache()

    def _seat(self, joining: Sequence[Row] = (), least: Layout | None = None) -> None:
        """Give rows slots, and list their pages in the table.

        Args:
            least: the layout is no smaller; None for the present one.
        """
        if not self.caches:
            self._begin()
        inside = list(self.seated)
        rows = [*inside, *joining]
        longest = max((len(row.pages) for row in rows), default=0)
        layout = layout_for(len(rows), self.pages.used, longest, least or self.layout)
        layout = layout._replace(slots=self._fixed or layout.slots)
        if layout.pages != self.pages.size:
            self._resize(layout.pages)
        if packs := layout.slots < self.layout.slots:
            inside.sort(key=slot_of)
        moves: list[int | None] = [None] * layout.slots
        for n, row in enumerate(inside):
            moves[n if packs else slot_of(row)] = row.slot
        if layout != self.layout or packs:
            self._move(layout, moves)
        for n, row in enumerate(inside):
            row.slot = n if packs else slot_of(row)
        free = [slot for slot, old in enumerate(moves) if old is None]
        for row, slot in zip(joining, free, strict=False):
            row.slot = slot
        pages: list[tuple[int, ...]] = [()] * layout.slots
        for row in rows:
            pages[slot_of(row)] = indices(row.pages)
        longest, listed = layout.capacity // PAGE, sum(map(len, pages))
        self.state["table"] = table_of(pages, longest)
        # As many as a pool that has nothing else, and never fewer than before: each is a trace.
        count = layout_for(layout.slots, listed, longest).pages
        count = max(count, self.state["entries"].size if "entries" in self.state else 0)
        self.state["entries"] = entries_of(pages, longest, count)

    def _move(self, layout: Layout, moves: Sequence[int | None]) -> None:
        """Move rows to the slots of another layout; see `AttentionCache.move`."""
        for cache in self.caches:
            cache.move(moves, layout.capacity)
            # See `_resize`.
            mx.eval(cache.arrays)
        stay = unmoved(moves, self.layout.slots)
        self.state = without_pages(self.state) if stay else moved(self.state, moves)
        if self.looks_up:
            length = history_length(layout)
            self.state["history"] = widened(self.state["history"], length)[:, :length]
        self.layout = layout
        self.changed = True
        self._settle()
        mx.clear_cache()

    def _leave_drafts(self, slots: int, depth: int) -> None:
        """Leave what a step leaves for the next, so that the first has no shape of its own."""
        self.state["drafts"] = mx.zeros((slots, depth), mx.int32)
        caches, start = self._model.new_caches(slots, TAIL), mx.zeros((slots,), mx.int32)
        window = Window.at(start, start, 1 + depth, own_pages(slots, pages_for(TAIL)))
        # Never evaluated: only the shapes are wanted.
        self._model.forward(mx.zeros((slots, 1 + depth), mx.int32), caches, window, start)
        for cache, after in zip(self.caches, caches, strict=True):
            if isinstance(cache, RecurrentCache) and isinstance(after, RecurrentCache):
                cache.kept = [mx.zeros_like(part) for part in after.kept]


def seat_of(row: Row) -> Seat:
    """Where a row in a slot is."""
    return Seat(slot_of(row), indices(row.pages))


def slot_of(row: Row) -> int:
    if row.slot is None:
        raise ValueError(f"row {row.row_id} has no slot")
    return row.slot
