"""Scripts of reading and dropping, which a prefix cache must survive unseen."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from omlx_worker.engine.caches.layout import Pages
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs, size_of
from omlx_worker.engine.rows.page import Page
from tests.helpers.readers import Held, Reader, read_all

PROMPT = [*range(20)]

KINDS = {
    "attention": ("all", "all"),
    "sliding": ("sliding", "all"),
    "recurrent": ("recurrent", "all", "recurrent"),
    "recurrent alone": ("recurrent",),
    "sliding alone": ("sliding",),
}
"""Layers of a `StandIn`, by what is tested with them."""

AMPLE = 1 << 30

_prompts = st.tuples(
    st.integers(0, 99), st.integers(0, 40), st.lists(st.integers(0, 2), min_size=1, max_size=12)
)
"""Which earlier prompt to begin like, for how many tokens, and what follows."""

READS = st.tuples(st.just("read"), _prompts, st.sampled_from([1, 2, 5, 1000]))
DROPS = st.tuples(st.just("drop"), st.floats(0, 1), st.none())


def equal(ours: list[mx.array], theirs: list[mx.array], tolerance: float = 0) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance))
        for a, b in zip(ours, theirs, strict=True)
    )


class Rows:
    """A pool of small pages, the rows that have them, and the arrays behind them.

    What nobody has is NaN, so nobody else's numbers are right by chance.
    """

    PAGE = 4

    def __init__(self, specs: LayerSpecs) -> None:
        self.specs = specs
        self.pages = Pages(0, self.PAGE)
        self._held: list[list[mx.array]] = []

    def pieces(self, pages: Sequence[Page], start: int, end: int) -> list[mx.array]:
        first = start % self.PAGE
        columns = zip(*(self._held[page.index] for page in pages), strict=True)
        whole = [mx.concatenate(list(column), axis=2) for column in columns]
        return [mx.contiguous(part[:, :, first : first + end - start]) for part in whole]

    def filled(self, pieces: Sequence[mx.array], positions: int) -> list[Page]:
        pages = self.new(-(-positions // self.PAGE))
        self.write(pages, 0, pieces)
        return pages

    def new(self, count: int) -> list[Page]:
        self.pages.resize(max(self.pages.size, self.pages.used + count))
        while len(self._held) < self.pages.size:
            self._held.append(self._nothing())
        return self.pages.take(count)

    def write(self, pages: Sequence[Page], start: int, pieces: Sequence[mx.array]) -> None:
        """Write keys and values from a position on."""
        length = pieces[0].shape[2] if pieces else 0
        for at in range(length):
            page, place = divmod(start + at, self.PAGE)
            for part, piece in zip(self._held[pages[page].index], pieces, strict=True):
                part[:, :, place] = piece[:, :, at]

    def share(self, pages: Sequence[Page], length: int) -> list[Page]:
        """A row's own pages of a beginning that was found."""
        whole = length // self.PAGE
        own = self.pages.lend(pages[:whole])
        own += self.new(-(-length // self.PAGE) - whole)
        if length % self.PAGE:
            self.write(own, whole * self.PAGE, self.pieces(pages[whole:], 0, length % self.PAGE))
        return own

    def release(self, pages: list[Page]) -> None:
        self.pages.release(pages)
        self.forget()

    def forget(self) -> None:
        """Fill what nobody has with NaN."""
        for place, page in enumerate(self.pages._pages):
            if page is None:
                self._held[place] = self._nothing()

    def _nothing(self) -> list[mx.array]:
        shapes = [(spec.shape, spec.dtype) for spec in self.specs.pieces]
        return [mx.full((*s[:2], self.PAGE, *s[3:]), mx.nan, dtype) for s, dtype in shapes]


class Kept(PrefixCache):
    """A prefix cache over `Rows`, which takes and gives whole arrays of rows that leave at once."""

    def __init__(self, specs: LayerSpecs, most: int) -> None:
        self.rows = Rows(specs)
        super().__init__(specs, most, self.rows)

    def keep(self, tokens: list[int], layers: Held, salt: str | None = None) -> None:
        pieces, states = split(self.rows.specs, layers)
        pages = self.rows.filled(pieces, len(tokens))
        self.put(tokens, pages, [states], salt)
        self.rows.release(pages)
        self.trim()

    def find(self, tokens: list[int], salt: str | None = None) -> tuple[int, Held]:
        length, pages, states = self.take(tokens, salt)
        return length, whole(self.rows, pages, states, length)


class LiveRow:
    """A row that reads a prompt as a decoder does: takes, reads, and keeps where the tree branches
    and at the end. It stays until it leaves."""

    def __init__(self, cache: Kept, reader: Reader, prompt: list[int], chunk: int) -> None:
        self.prompt = prompt
        self._rows, self._reader, self._chunk = cache.rows, reader, chunk
        self.done, pages, self._states = cache.take(prompt)
        self.pages = self._rows.share(pages, self.done)
        branch = cache.shared(prompt)
        for end in sorted({max(branch, self.done), len(prompt)}):
            self.read_to(end)
            cache.put(prompt[:end], self.pages, self._states)

    @property
    def layers(self) -> Held:
        return whole(self._rows, self.pages, self._states, self.done)

    def read_to(self, end: int, prompt: list[int] | None = None) -> None:
        while self.done < end:
            last = min(end, self.done + self._chunk)
            layers = self._reader.read(prompt or self.prompt, self.done, last, self.layers)
            pieces, states = split(self._rows.specs, layers)
            self.pages += self._rows.new(-(-last // Rows.PAGE) - len(self.pages))
            self._rows.write(self.pages, self.done, [p[:, :, self.done : last] for p in pieces])
            self._states, self.done = self._rows.specs.layers_of(states), last

    def leave(self) -> None:
        self._rows.release(self.pages)


def split(specs: LayerSpecs, layers: Held) -> tuple[list[mx.array], list[mx.array]]:
    """The pieces and the states of a row."""
    pieces: list[mx.array] = []
    states: list[mx.array] = []
    for spec, arrays in zip(specs.layers, layers, strict=True):
        (pieces if spec[0].positions is None else states).extend(arrays)
    return pieces, states


def whole(rows: Rows, pages: Sequence[Page], states: Held, length: int) -> Held:
    """What the layers hold of a row."""
    pieces = iter(rows.pieces(pages, 0, length) if length else [])
    return [part or [next(pieces), next(pieces)] for part in states] if length else []


def findable(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> int:
    """How many tokens of a prompt `take` would find. This counts as no use."""
    order = list(cache._nodes)
    length, _, _ = cache.take(tokens, salt)
    cache._nodes = OrderedDict.fromkeys(order)
    return length


def give_up(cache: Kept, size: int) -> int:
    """Let a cache drop that many bytes or a little more; returns how many it has dropped."""
    before, limit = cache.nbytes, cache.limit
    cache.limit_to(before - size)
    cache.limit_to(limit)
    cache.rows.forget()
    return before - cache.nbytes


def play(
    reader: Reader, script: list[Any], start: Callable[[], Kept], tolerance: float = 0
) -> None:
    """Read prompts, drop nodes, let rows leave: every row is what it is if read cold."""
    cache = start()
    asked: list[list[int]] = []
    rows: list[LiveRow] = []

    def check() -> None:
        for each in rows:
            prompt = each.prompt[: each.done]
            wanted = reader.arrays(read_all(reader, prompt))
            assert equal(reader.arrays(each.layers), wanted, tolerance), prompt

    for act, what, chunk in script:
        if act == "drop":
            check()
            leaving, rows = rows[: int(what * len(rows))], rows[int(what * len(rows)) :]
            for row in leaving:
                row.leave()
            cache.trim()
            give_up(cache, int(what * cache.nbytes))
        else:
            like, length, rest = what
            begin = asked[like % len(asked)] if asked else [0, 1, 2] * 3
            asked.append([*begin[:length], *rest])
            rows.append(LiveRow(cache, reader, asked[-1], chunk))
        check_tree(cache, rows)
    check()
    # Rows write to their pages in place, which must reach neither the tree nor other rows.
    for number, row in enumerate(rows):
        row.prompt = [*row.prompt, 0, number % 3]
        row.read_to(len(row.prompt))
    check()
    for prompt in asked:
        length, layers = cache.find(prompt)
        if length:
            wanted = reader.arrays(read_all(reader, prompt[:length]))
            assert equal(reader.arrays(layers), wanted, tolerance), prompt[:length]
    for row in rows:
        row.leave()
    cache.limit_to(0)
    assert cache.rows.pages.used == cache.rows.pages.saved == cache.nbytes == 0


def check_tree(cache: Kept, rows: Sequence[LiveRow] = ()) -> None:
    nodes, pages = list(cache._nodes), cache.rows.pages
    assert cache._states == sum(size_of(node.states or []) for node in nodes)
    assert cache.nbytes <= cache.limit
    had = (page for row in rows for page in row.pages)
    assert not pages.miscounted(had, cache.pages)
    assert all(node.children or node.states is not None for node in nodes), "a useless node"
    roots = list(cache._roots.values())
    assert all(root.children for root in roots), "a useless root"
    reachable, below = 0, roots
    while below:
        children = below.pop().children
        below += children
        reachable += len(children)
    assert reachable == len(nodes)
