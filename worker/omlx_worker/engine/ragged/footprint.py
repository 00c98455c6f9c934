"""The memory that rows take on the device, computed from shapes, and the memory budget."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import Layout, layout_for, pages_for
from omlx_worker.engine.kernels.window import PAGE, TAIL, Window, own_pages
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.lookups import history_length
from omlx_worker.engine.ragged.prefix_arrays import size_of
from omlx_worker.engine.ragged.reading import MOST_LOGITS, SCORED_AT_ONCE, SPREAD, room_for
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.row import Size

IN_FLIGHT = 3
"""Copies of the arrays that steps rewrite: of the last step, the one in flight and the next."""

_SEARCHED = 3
"""Arrays ``[S, history]`` int32 that a search for drafts holds at once. Measured: 2.3, or 13
where `mx.compile` is off."""


_BARE, _SAMPLED = 12, 40
"""Bytes a position and entry of the vocabulary that a step holds at once: of rows that take the
likeliest token of the model's logits, and of any."""

ROWS_SHARE = 0.9
"""Share of Metal's recommended working set; the rest is for results of a prefill chunk."""

PREFIX_SHARE = 8
"""The default size of the prefix cache is the memory limit divided by this."""

_CACHE_SHARE, _MOST_CACHED = 8, 4 << 30

_POOL_SHARE, _FIRST_POOL = 8, 256
"""A pool begins with 256 pages, or with fewer that take at most an eighth of the room for rows.
Each size of a pool is another trace of every step. Few rows and kept beginnings fit into this."""


def budget() -> int:
    """Bytes that weights and rows may take together.

    Nine tenths of Metal's recommended working set. Elsewhere what CUDA, or without a GPU the
    system, reports as free, plus what this process has taken already.
    """
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return int(ROWS_SHARE * int(recommended))
    return int(info.get("free_memory") or _free()) + allocated()


def allocated() -> int:
    """Bytes that MLX has taken, kept buffers included. From any thread."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def keep_within(limit: int) -> None:
    """Set the limits of MLX's allocator.

    Free buffers kept for reuse are limited to an eighth of the budget and to 4 GiB, because
    layouts change and a buffer of one layout fits few others. No allocation fails because of the
    limits: beyond them MLX frees kept buffers and waits for work in flight.

    Args:
        limit: bytes for everything.
    """
    mx.set_memory_limit(limit)
    mx.set_cache_limit(min(limit // _CACHE_SHARE, _MOST_CACHED))


def _free() -> int:
    """Memory that the system can give out without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class RowBytes:
    """What the cache of one row takes.

    Attributes:
        token: bytes a token, in layers that keep all of them.
        sliding: bytes of layers with a sliding window, at most.
        state: bytes of recurrent layers.
    """

    token: int
    sliding: int
    state: int


class Footprint:
    """Memory of a ragged batch by its shapes.

    Args:
        depth: drafts a row and step, at most.
        looks_up: whether drafts are looked up.
        fixed: slots of every step; 0 for as many as rows need.
    """

    def __init__(
        self, model: RaggedModel, depth: int, *, looks_up: bool = False, fixed: int = 0
    ) -> None:
        # Never evaluated, so nothing is allocated.
        caches = model.new_caches(1, TAIL)
        attention = [cache for cache in caches if isinstance(cache, AttentionCache)]
        recurrent = [cache for cache in caches if not isinstance(cache, AttentionCache)]
        pools = [cache.pool for cache in attention]
        # Bytes of a position and the ring of every attention layer.
        self._layers = [(pool.position_bytes, pool.ring) for pool in pools]
        tails = sum(size_of(cache.tails) for cache in attention)
        state = sum(size_of(cache.arrays) for cache in recurrent)
        kept = 0
        if depth:
            start = mx.zeros((1,), mx.int32)
            window = Window.at(start, start, 1 + depth, own_pages(1, pages_for(TAIL)))
            model.forward(mx.zeros((1, 1 + depth), mx.int32), caches, window, start)
            kept = sum(size_of(cache.kept) for cache in recurrent)
        # Tails, states and kept inputs.
        self._slot = tails + state + kept
        self._vocabulary = model.vocabulary
        self._logits = model.vocabulary * (1 + depth)
        self._state = state
        # The logits of a window; of those scored at once, four arrays of 4 bytes each.
        self._scoring = MOST_LOGITS * model.dtype.size + 16 * SCORED_AT_ONCE
        self._depth, self._looks_up, self._fixed = depth, looks_up, fixed
        self._looks = model.looks

    @property
    def of_row(self) -> RowBytes:
        token = sum(size for size, ring in self._layers if not ring)
        return RowBytes(token, sum(size * ring for size, ring in self._layers), self._state)

    def empty(self, room: int) -> Layout:
        """The layout without rows.

        Args:
            room: bytes for rows.
        """
        page = PAGE * max(1, self.of_row.token)
        fitting = max(1, room // _POOL_SHARE // page)
        return Layout(pages=min(_FIRST_POOL, 1 << fitting.bit_length() - 1))

    def of_rows(self, rows: Sequence[Size], layout: Layout, others: int = 0, saved: int = 0) -> int:
        """See `omlx_worker.engine.rows.interface.Engine.bytes_for`.

        Args:
            layout: of the batch that they join, or are in.
            others: pages of its pool that none of these rows has. They are not counted.
            saved: how many more pages rows would have there if they shared none.
        """
        # A row's last step may commit drafts beyond its end before the host has read it.
        needs = [pages_for(longest + max(0, self._depth - 1)) for _, longest, *_ in rows]
        # Rows use the present layout as long as it suffices, then the smallest one.
        pages = sum(needs) - saved - sum(map(_shared, rows)) + others
        grown = layout_for(len(needs), pages, max(needs, default=0), layout)
        if self._fixed:
            grown = grown._replace(slots=self._fixed)
        prompts = [to_read for to_read, *_ in rows if to_read]
        reading = sum(map(self._of_prompt, prompts))
        if any(to_read and scored for to_read, _, *rest in rows for scored in rest[:1]):
            reading += self._scoring
        if self._looks:
            reading += self._looks.bytes_for([vectors for size in rows for vectors in size[4:5]])
        bodies = [
            size * (grown.slots * min(grown.capacity, ring) if ring else grown.pages * PAGE)
            for size, ring in self._layers
        ]
        bare = all(size[3:4] == (1,) for size in rows)
        slot = self._slot + (0 if bare else 4 * self._vocabulary)  # counts
        # Measured, over a window at once: all sampling rules together are ten float32 arrays.
        window = self._logits * (_BARE if bare else _SAMPLED)
        passing = max(
            # The plain form of a step copies bodies, one layer's while the last one's are freed. So
            # does a change of the pool.
            grown.slots * ((IN_FLIGHT - 1) * slot + window) + 2 * max(bodies, default=0),
            # Rows that meet have more room than they need. A layer's bodies are gathered twice.
            int(2 * SPREAD * sum(map(room_for, prompts)))
            * max((size for size, _ in self._layers), default=0),
        )
        standing = sum(bodies) + grown.slots * slot - others * PAGE * self.of_row.token
        return standing + reading + passing + self._of_histories(grown)

    def _of_histories(self, layout: Layout) -> int:
        """Bytes of histories, and of a search for drafts."""
        if not self._looks_up:
            return 0
        return 4 * layout.slots * (IN_FLIGHT + _SEARCHED) * history_length(layout)

    def _of_prompt(self, tokens: int) -> int:
        """Bytes of a prompt while it is read, besides pages: its window, rings and states."""
        of_row = self.of_row
        each = sum(size for size, _ in self._layers)
        return min(tokens, LONGEST_CHUNK) * each + of_row.sliding + of_row.state


def _shared(row: Size) -> int:
    """Pages that a row will take from rows that have them."""
    return sum(tokens // PAGE for tokens in row[5:])
