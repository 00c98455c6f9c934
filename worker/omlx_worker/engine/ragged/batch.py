"""The rows of a ragged batch: which row has which slot and pages, and the arrays behind them.

A row has pages from the first token of its prompt to its end. It takes a slot when it joins and
frees it when it leaves. Slots and pages move only between steps, with the pipeline drained: when
they do not suffice, and when the batch has been too large for a while. MLX updates a buffer in
place only while nothing in flight holds it, so all that writes to caches here drains first.

A suspended row keeps its pages, and takes what else layers hold of it along until it is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from omlx_worker.engine.caches.layout import (
    Layout,
    Page,
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
from omlx_worker.engine.ragged.lookups import (
    BEFORE_OWN,
    SHORTEST,
    Runs,
    history_length,
    history_of,
)
from omlx_worker.engine.ragged.masks import Matcher
from omlx_worker.engine.ragged.sampling import counts_of
from omlx_worker.engine.ragged.step import State
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.thinking import Thoughts

SHRINK_AFTER = 32
"""Steps with twice the slots or capacity that rows need before the batch shrinks (hysteresis).
A larger excess shrinks sooner: eight times the need after a seventh of these steps."""

_PER_ROW = ("pending", "cursors", "body_lengths", "accepted", "offered", "source")
_CUT = ("drafts", "history")
"""Arrays whose second axis differs between batches."""


@dataclass(eq=False, slots=True)
class BatchRow:
    """A row that joins the batch, is in it or is suspended, as far as the host knows it.

    Attributes:
        tokens: its history, as far as the host has read it.
        body_length: tokens in the bodies.
        cursor: tokens in the cache, at most; exact once every dispatched step is read.
        remaining: tokens still wanted, at most; likewise.
        pages: of its bodies.
        layers, state: while it has no slot, its part of every layer's cache besides pages, as the
            cache writes it, and of the state, ``[1, ...]``.
        slot: its own, while it has one.
        accepted: drafts of the last step that was read.
        gone: whether it has left for good.
        matcher: of a constrained row; knows the tokens that the host has read.
        thoughts: likewise of a row whose model marks its thinking.
        runs: likewise where drafts are looked up.
    """

    request: Row
    tokens: list[int]
    body_length: int
    cursor: int
    remaining: int
    pages: list[Page]
    layers: Layers
    state: State
    slot: int = 0
    accepted: int = 0
    gone: bool = False
    matcher: Matcher | None = None
    thoughts: Thoughts | None = None
    runs: Runs | None = None

    @property
    def row_id(self) -> str:
        return self.request.row_id

    @property
    def seat(self) -> Seat:
        return Seat(self.slot, indices(self.pages))

    @property
    def nbytes(self) -> int:
        """Of its arrays while it has no slot, without its pages."""
        arrays = [array for layer in self.layers for array in layer]
        return sum(array.nbytes for array in [*arrays, *self.state.values()])

    @property
    def in_tail(self) -> int:
        """Positions in its tail, at most."""
        return self.cursor - self.body_length


class Batch:
    """Rows in slots.

    Args:
        looks_up: whether drafts are looked up.
        fixed: slots of every step, with or without rows; 0 for as many as rows need.
        depth: drafts of every step then.

    Attributes:
        rows: those in slots, by their ids.
        suspended: likewise those that may be resumed.
        layout: its slots and pages.
        empty: the layout without rows. Any other has as many pages at least.
        pages: those of the layout: which rows have them, with slots or without, and which are kept.
        caches: one a layer, the head's after the backbone's; none while no row has pages or a slot.
        state: see `omlx_worker.engine.ragged.step`.
        drains: how many times the pipeline was drained to join, fold, rearrange or suspend.
        changed: whether rows have joined, left or moved; the caller resets it.
    """

    def __init__(
        self, model: RaggedModel, *, looks_up: bool = False, fixed: int = 0, depth: int = 0
    ) -> None:
        self.rows: dict[str, BatchRow] = {}
        self.suspended: dict[str, BatchRow] = {}
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
        return self.layout.slots if self.rows else 0

    def join(self, rows: Sequence[tuple[Row, list[Page], Layers]]) -> None:
        """Add rows. Their histories but for the last tokens are prefilled.

        Args:
            rows: each with its pages and what else the layers hold of it; nothing for a one-token
                history.
        """
        self._enter([self._joining(*row) for row in rows])

    def _joining(self, row: Row, pages: list[Page], layers: Layers) -> BatchRow:
        history = row.history
        length = len(history) - 1
        values = {"pending": history[-1], "cursors": length, "body_lengths": length}
        values |= {"accepted": 0, "offered": 0, "source": 0}
        state = {name: mx.array([value], mx.int32) for name, value in values.items()}
        if self.looks_up:
            state["history"] = history_of(history)
        if row.sampling.penalises:
            state["counts"] = counts_of(history, self._model.vocabulary)[None]
        remaining = row.max_tokens - len(row.generated)
        joining = BatchRow(row, history, length, length, remaining, pages, layers, state)
        if self.looks_up:
            joining.runs = Runs(history, BEFORE_OWN if self._model.drafter else SHORTEST)
        if row.grammar is not None:
            joining.matcher = Matcher(row.grammar, row.generated)
        if row.sampling.thinking:
            joining.thoughts = Thoughts(row.sampling.thinking, row.generated)
        return joining

    def _enter(self, joining: Sequence[BatchRow]) -> None:
        """Give rows slots, and write their arrays there."""
        self._drain()
        self._seat(joining)
        self.rows |= {row.row_id: row for row in joining}
        self.changed = True
        self.hold_needed()
        for row in joining:
            self._write(row)
        self._settle()

    def suspend(self, row_id: str) -> int | None:
        """Take a row out of its slot until `resume`; returns its bytes, None if it has no slot.

        The next step still returns what the step in flight yields for it.
        """
        row = self.rows.get(row_id)
        if row is None:
            return None
        self.fold([row])
        row.layers = [cache.copy(row.slot) for cache in self.caches]
        own = mx.array([row.slot])
        useless = {"table", "entries"} | (set() if row.request.sampling.penalises else {"counts"})
        row.state = {name: array[own] for name, array in self.state.items() if name not in useless}
        mx.eval(row.layers, row.state)
        self.suspended[row_id] = row
        self._free(row)
        # Others wait for the memory that this frees.
        self.shrink(at_once=True)
        return row.nbytes + len(row.pages) * sum(cache.page_bytes for cache in self.caches)

    def resume(self, row_id: str) -> None:
        """Put a suspended row back into a slot."""
        self._enter([self.suspended.pop(row_id)])

    @property
    def suspended_pages(self) -> int:
        """How many pages suspended rows have. From any thread."""
        return sum(len(row.pages) for row in list(self.suspended.values()))

    def leave(self, row_id: str) -> None:
        """Drop a row, suspended or not, and the samples of the step in flight for it."""
        if row := self.suspended.pop(row_id, None) or self.rows.get(row_id):
            row.gone = True
            self.release(row.pages)
            if row_id in self.rows:
                self._free(row)

    def make_room(self, positions: int) -> None:
        """Move every tail to its body if one of them has no room for ``positions`` more."""
        if any(row.in_tail + positions > TAIL for row in self.rows.values()):
            self.fold(list(self.rows.values()))

    def share(self, own: list[Page], pages: Sequence[Page], length: int) -> None:
        """Give a row the pages that have its first ``length`` tokens. It writes to none of them: a
        page that has room for more tokens is copied.

        Args:
            own: the pages of the row, none yet.
        """
        whole = length // PAGE
        own += self.pages.lend(pages[:whole])
        self.reserve([(own, length)])
        begun, copied = (Seat(0, indices(part[whole:])) for part in (pages, own))
        for cache in self.caches:
            if cache.paged and begun.pages:
                cache.write(copied, cache.held(begun, PAGE))

    def reserve(self, rows: Sequence[tuple[list[Page], int]]) -> None:
        """Give rows pages. Waits for the step in flight, so that pages can be written to in place.

        Args:
            rows: the pages of each, and the positions that it needs room for.
        """
        self._settle()
        missing = [max(0, pages_for(length) - len(pages)) for pages, length in rows]
        used = self.pages.used + sum(missing)
        if not self.caches:
            self._begin()
        if used > self.pages.size:
            self._resize(pages_in(used))
        for (pages, _), count in zip(rows, missing, strict=True):
            pages += self.pages.take(count)

    def release(self, pages: list[Page]) -> None:
        """Take a row's pages back; with the last row go its arrays, but for pages that are kept."""
        self.pages.release(pages)
        self._end()

    def fold(self, rows: Sequence[BatchRow], end: int | None = None) -> None:
        """Move the tails of rows to their bodies.

        Args:
            end: the position up to which they are moved; None for the cursors.
        """
        self._drain()
        cursors: list[int] = self.state["cursors"].tolist()  # type: ignore[assignment]
        ends = [cursors[row.slot] if end is None else end for row in rows]
        self.reserve([(row.pages, end) for row, end in zip(rows, ends, strict=True)])
        self._seat()
        tails = [(row.seat, row.body_length, end) for row, end in zip(rows, ends, strict=True)]
        for cache in self.caches:
            cache.fold(tails)
            # One layer at a time: what moves is held twice.
            mx.eval(cache.arrays)
        lengths = mx.array(ends, mx.int32)
        self.state["body_lengths"][mx.array([row.slot for row in rows])] = lengths
        for row, end in zip(rows, ends, strict=True):
            row.body_length = end

    def shrink(self, *, at_once: bool = False) -> None:
        """Shrink the batch if it has been too large for a while; called once a step.

        Args:
            at_once: do not wait.
        """
        if not self.rows:
            return
        # The next fold may need as many.
        longest = [max(len(row.pages), pages_for(row.cursor)) for row in self.rows.values()]
        used = self.pages.used + sum(longest) - sum(len(row.pages) for row in self.rows.values())
        needed = layout_for(self._fixed or len(self.rows), used, max(longest), self.empty)
        too_large = excess(self.layout, needed)
        self._slack = self._slack + too_large if too_large else 0
        if too_large and (at_once or self._slack >= SHRINK_AFTER):
            self._drain()
            self._seat(least=needed)
            self._slack = 0

    def hold_needed(self) -> None:
        """Hold the counts of penalties only while a row needs them."""
        if not any(row.request.sampling.penalises for row in self.rows.values()):
            self.state.pop("counts", None)
        elif "counts" not in self.state:
            self.state["counts"] = mx.zeros((self.slots, self._model.vocabulary), mx.int32)

    def _drain(self) -> None:
        """Wait for the step in flight, so that only the caches hold their buffers."""
        if self.rows:
            self.drains += 1
            self._settle()

    def _settle(self) -> None:
        mx.eval([cache.arrays for cache in self.caches], self.state)

    def _free(self, row: BatchRow) -> None:
        """Free a row's slot."""
        del self.rows[row.row_id]
        self.changed = True
        # Else steps would write past the tail of a slot without a row.
        for name in ("cursors", "body_lengths"):
            self.state[name][row.slot] = 0
        self._end()

    def _end(self) -> None:
        """Drop all arrays that nobody has any part of, once no row is left."""
        if self.rows or self.pages.used > self.pages.alone:
            return
        self._slack = 0
        if self.pages.used:
            self._begin()
        else:
            self.caches, self.state, self.layout = [], {}, self.empty
            self.pages.resize(0)

    def _write(self, row: BatchRow) -> None:
        """Write a row's arrays to its slot, with as many of its drafts as there is room for."""
        slot, state = row.slot, self.state
        for cache, part in zip(self.caches, row.layers or [[]] * len(self.caches), strict=True):
            cache.write(row.seat, part)
        for name, value in row.state.items():
            if name in _CUT and name in state:
                width = min(value.shape[1], state[name].shape[1])
                state[name][slot, :width] = value[0, :width]
            elif name in state:
                state[name][slot] = value[0]
        room = state["drafts"].shape[1] if "drafts" in state else 0
        state["offered"][slot] = mx.minimum(row.state["offered"][0], room)
        row.layers, row.state = [], {}

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
        self.state = {name: mx.zeros((slots,), mx.int32) for name in _PER_ROW}
        if self.looks_up:
            self.state["history"] = mx.zeros((slots, history_length(self.layout)), mx.int32)
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

    def _seat(self, joining: Sequence[BatchRow] = (), least: Layout | None = None) -> None:
        """Give rows slots, and list their pages in the table.

        Args:
            least: the layout is no smaller; None for the present one.
        """
        if not self.caches:
            self._begin()
        inside = list(self.rows.values())
        rows = [*inside, *joining]
        longest = max((len(row.pages) for row in rows), default=0)
        layout = layout_for(len(rows), self.pages.used, longest, least or self.layout)
        layout = layout._replace(slots=self._fixed or layout.slots)
        if layout.pages != self.pages.size:
            self._resize(layout.pages)
        if packs := layout.slots < self.layout.slots:
            inside.sort(key=lambda row: row.slot)
        moves: list[int | None] = [None] * layout.slots
        for n, row in enumerate(inside):
            moves[n if packs else row.slot] = row.slot
        if layout != self.layout or packs:
            self._move(layout, moves)
        for n, row in enumerate(inside):
            row.slot = n if packs else row.slot
        free = [slot for slot, old in enumerate(moves) if old is None]
        for row, slot in zip(joining, free, strict=False):
            row.slot = slot
        pages: list[tuple[int, ...]] = [()] * layout.slots
        for row in rows:
            pages[row.slot] = indices(row.pages)
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
        for name in ("table", "entries"):
            self.state.pop(name, None)
        if not unmoved(moves, self.layout.slots):
            slots = mx.array([slot or 0 for slot in moves], mx.int32)
            self.state = {name: array[slots] for name, array in self.state.items()}
            taken = mx.array([slot is not None for slot in moves])
            for name in ("cursors", "body_lengths"):
                self.state[name] = self.state[name] * taken
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
