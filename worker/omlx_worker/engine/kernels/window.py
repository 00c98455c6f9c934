"""The window of tokens that a forward runs for each row: where they go, and what they may see.

A step's window commits its first token and the drafts that are accepted; its keys and values go to
the tail. A window of prompts commits all of its tokens; it is its own tail, and goes to the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import mlx.core as mx

from omlx_worker.engine.towers.tower import Seen

TAIL = 128
"""Positions of the tail; a fold moves them to the body before it can overflow.

Every step copies the tail, and every fold waits for the step in flight.
"""

PAGE = 64
"""Positions of a page, of which bodies are made."""


@dataclass(frozen=True)
class Window:
    """Where the tokens of one forward go; shared by all of its attention layers.

    Attributes:
        cursors: ``[S]`` int32, filled positions of each row's cache: where the window's keys and
            values go, and what its queries see.
        body_lengths: ``[S]`` int32, how many of them are in the bodies.
        turns: ``[S]`` int32, the position that the window's first token is rotated by, or has a
            learned embedding of. The cursor in rows of text.
        table: ``[S, M]`` int32, the pages of each row's bodies, in their order.
        entries: ``[E]`` int32, the places of pages in the flat table, -1 for none; None for all.
        index: ``[S, 1, W, 1]``, tail positions of the window's keys and values.
        places: ``[S, 3]`` int32, body lengths, cursors and turns, for kernels.
        positions: of prompts with pictures, ``[S, W, D]`` int32, what each of the ``D`` pairs of
            rotated numbers is rotated by, or ``[S, W, 1]``; None for `turns` and the places after.
        seen: of prompts with pictures, vectors in place of tokens; None for none.
        blocks: of prompts, ``[S, W]`` int32, tokens that see one another in layers with a sliding
            window, as a picture's do in Gemma 4; 0 for those that see back alone. None for none.
        tail: positions of a tail.
        lengths: of prompts, ``[S]`` int32, each row's tokens; the rest of its window is padding.
            None for a step.
        longest: of prompts, the longest body length.
        even: of prompts, whether all body lengths are equal.
        both_ways: of whole prompts, whether every token sees those after it too.
    """

    cursors: mx.array
    body_lengths: mx.array
    turns: mx.array
    table: mx.array
    index: mx.array
    places: mx.array
    positions: mx.array | None = None
    seen: Seen | None = None
    blocks: mx.array | None = None
    tail: int = TAIL
    lengths: mx.array | None = None
    entries: mx.array | None = None
    longest: int = 0
    even: bool = False
    both_ways: bool = False
    _listed: dict[int, tuple[mx.array, mx.array, mx.array]] = field(default_factory=dict)
    _masks: dict[tuple[int, int], tuple[mx.array, mx.array]] = field(default_factory=dict)

    @classmethod
    def at(
        cls,
        cursors: mx.array,
        body_lengths: mx.array,
        width: int,
        table: mx.array,
        entries: mx.array | None = None,
        shifts: mx.array | None = None,
    ) -> Self:
        """The window of ``width`` tokens per row that starts at each row's cursor.

        Args:
            shifts: ``[S]`` int32, from cursors to turns; None for no difference.
        """
        turns = cursors if shifts is None else cursors + shifts
        offsets = (cursors - body_lengths)[:, None] + mx.arange(width)
        # One array, so that a single slot's are more than MLX keeps in memory shared with the host.
        places = mx.stack([body_lengths, cursors, turns], axis=1)
        index = offsets[:, None, :, None]
        return cls(cursors, body_lengths, turns, table, index, places, entries=entries)

    def starting_at(self, cursors: mx.array, width: int) -> Window:
        """The window of ``width`` tokens of the same rows that starts at other cursors."""
        shifts = self.turns - self.cursors
        return Window.at(cursors, self.body_lengths, width, self.table, self.entries, shifts)

    @classmethod
    def of_prompts(
        cls,
        done: Sequence[int],
        counts: Sequence[int],
        width: int,
        table: mx.array,
        shifts: Sequence[int] | None = None,
    ) -> Self:
        """The window of prompts.

        Args:
            done: each row's tokens before the window.
            counts: each row's tokens in it.
            width: tokens of the window, padding included.
            shifts: of each row, see `at`.
        """
        cursors = mx.array(list(done), mx.int32)
        moved = None if shifts is None else mx.array(list(shifts), mx.int32)
        window = cls.at(cursors, cursors, width, table, None, moved)
        lengths = mx.array(list(counts), mx.int32)
        even, longest = len(set(done)) == 1, max(done)
        return replace(window, tail=width, lengths=lengths, longest=longest, even=even)

    @property
    def width(self) -> int:
        width: int = self.index.shape[2]
        return width

    @property
    def capacity(self) -> int:
        """Positions of a body."""
        return int(self.table.shape[1]) * PAGE

    @property
    def begins(self) -> bool:
        """Of prompts, whether there is nothing before it and no picture in it."""
        pictured = self.positions is not None or self.seen is not None
        return not (self.longest or pictured)

    def filled(self) -> Window:
        """A window of this shape after rows that fill three quarters of their bodies and tails."""
        body_lengths = mx.full(self.cursors.shape, self.capacity * 3 // 4, mx.int32)
        table = own_pages(*self.table.shape)
        return Window.at(body_lengths + TAIL * 3 // 4, body_lengths, self.width, table)

    def masks(self, sliding: int = 0, ring: int = 0) -> tuple[mx.array, mx.array]:
        """What each query may see of the bodies and of the tail; made once for all layers.

        Args:
            sliding: how many of the latest positions, its own included; 0 for all. Of a window
                that sees both ways half as many to each side, and its own.
            ring: positions of a layer's bodies, at most; 0 for all.

        Returns:
            ``[S, 1, W or 1, capacity]`` bool, and ``[S, 1, W, tail]`` bool.
        """
        if (sliding, ring) not in self._masks:
            self._masks[sliding, ring] = self._masked(sliding, ring)
        return self._masks[sliding, ring]

    def listed(self, sliding: int = 0) -> tuple[mx.array, mx.array, mx.array]:
        """The pages in `entries`; made once for all layers.

        Args:
            sliding: see `masks`.

        Returns:
            Pages and slots, ``[E]`` int32 each, and a mask ``[E, 1, W or 1, PAGE]``.
        """
        if sliding not in self._listed:
            mask, _ = self.masks(sliding)
            slots, longest = self.table.shape
            entries = mx.arange(slots * longest) if self.entries is None else self.entries
            of_entries = mx.unflatten(mask, 3, (longest, PAGE)).transpose(0, 3, 1, 2, 4)
            place = mx.maximum(entries, 0)
            seen = of_entries.flatten(0, 1)[place] & (entries >= 0)[:, None, None, None]
            self._listed[sliding] = self.table.flatten()[place], place // longest, seen
        return self._listed[sliding]

    def _masked(self, sliding: int, ring: int) -> tuple[mx.array, mx.array]:
        places = mx.arange(self.tail)
        if self.both_ways and self.lengths is not None:
            seen = places < self.lengths[:, None, None, None]
            if sliding:
                seen = seen & (mx.abs(places - self.index) <= sliding // 2)
            return seen[..., :0], seen
        tail = places <= self.index
        length = self.body_lengths[:, None, None, None]
        # The first tail index that each query sees; below 0 it sees some of the body too.
        first = self.index - (sliding - 1)
        if sliding:
            if self.blocks is not None:
                mine, others = self.blocks[:, None, :, None], self.blocks[:, None, None]
                tail = tail | ((mine == others) & (mine > 0))
            tail = tail & (places >= first)
        position = mx.arange(min(self.capacity, ring) if ring else self.capacity)
        if ring:
            # The latest position of the history at each index; negative if there is none.
            position = length - 1 - (length - 1 - position) % ring
            body = position >= 0
        else:
            body = position < length
        return body & (position >= length + first) if sliding else body, tail


def table_of(rows: Sequence[Sequence[int]], longest: int) -> mx.array:
    """The table of rows with these pages, ``[S, longest]``. What a row has no page for is 0."""
    return mx.array([[*pages, *[0] * longest][:longest] for pages in rows], mx.int32)


def entries_of(rows: Sequence[Sequence[int]], longest: int, count: int) -> mx.array:
    """The entries of a `table_of` rows with these pages, padded to ``count``."""
    places = [slot * longest + at for slot, pages in enumerate(rows) for at in range(len(pages))]
    return mx.array(places + [-1] * (count - len(places)), mx.int32)


def own_pages(slots: int, pages: int) -> mx.array:
    """The table of ``slots`` with ``pages`` each, in a pool that has no others.

    Neighbouring pages belong to neighbouring slots, so that a pool grows at its end.
    """
    return mx.arange(slots * pages, dtype=mx.int32).reshape(pages, slots).T
