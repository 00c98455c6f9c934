"""Beginnings of prompts that have been read, in a tree of pages.

A node is a page with the tokens that it holds, whole or the last one of a prompt, which may have
fewer. Rows have these pages too: nothing is copied, and what rows share is in the pool once.
Prompts that part within a page each have one of their own.

Layers with a sliding window or a recurrent state are known only where a prompt was put; only the
node that ends there has their arrays. So a prompt takes the longest path to a node with these
arrays. If all layers of a model have pages, it takes any path, and the first tokens of a page.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

import mlx.core as mx

from omlx_worker.engine.models.ragged_model import Layers
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs, copies, size_of
from omlx_worker.engine.rows.page import Page
from omlx_worker.engine.rows.tokens import in_common

Tokens: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""

_TOKENS = attrgetter("tokens")


@dataclass(eq=False, slots=True)
class _Node:
    """A page, and what the other layers hold after its tokens. A root has no page.

    Attributes:
        states: the arrays of layers without pages; empty where there are no such layers, None where
            they are not known.
        salt: of the prompts below a root.
        children: in the order of their tokens.
    """

    tokens: Tokens
    page: Page | None = None
    parent: _Node | None = None
    salt: str | None = None
    states: list[mx.array] | None = None
    children: list[_Node] = field(default_factory=list)

    @property
    def frees(self) -> bool:
        """Whether memory is free when it goes: what rows have stays."""
        return bool(self.states) or (self.page is not None and not self.page.rows)

    def usable(self, rest: Tokens) -> int:
        """How many tokens of this node a prompt can reuse whose next tokens are ``rest``."""
        if self.states:
            return len(self.tokens) * (self.tokens == rest[: len(self.tokens)])
        return 0 if self.states is None else in_common(self.tokens, rest)

    def near(self, tokens: Tokens) -> list[_Node]:
        """The children one of which has the most tokens in common with these."""
        at = bisect_left(self.children, tokens, key=_TOKENS)
        return self.children[max(0, at - 1) : at + 1]

    def child(self, tokens: Tokens) -> _Node | None:
        """The shortest child that begins with these tokens."""
        near = self.near(tokens)
        return next((each for each in near if each.tokens[: len(tokens)] == tokens), None)


class PrefixCache:
    """What rows have read, for rows that begin alike. It belongs to the decode thread.

    Args:
        specs: of what the model's layers keep.
        most: bytes; 0 keeps nothing. The least recently used are dropped.
        pool: whose pages are kept.

    Attributes:
        limit: bytes, at present.
    """

    def __init__(self, specs: LayerSpecs, most: int, pool: Batch) -> None:
        self._specs = specs
        self._most = self.limit = most
        self._pool = pool
        self._states = 0
        self._cuts = all(spec.positions is None for layer in specs.layers for spec in layer)
        # One for each salt that anything is kept of.
        self._roots: dict[str | None, _Node] = {}
        # Least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all states kept, and of pages that no row has."""
        return self._states + self._bytes_of(self._pool.pages.alone)

    @property
    def pages(self) -> list[Page]:
        """The pages that the tree keeps."""
        return [node.page for node in self._nodes if node.page]

    def shared(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of a prompt agree with a kept one, even if `take` finds fewer.

        A row that is put after these tokens lets the next one take all of them.
        """
        prompt = array("I", tokens)
        path = self._match(prompt, salt)
        if not path:
            return 0
        start, rest = self._rest(path, prompt)
        common = (in_common(child.tokens, rest) for child in path[-1].near(rest))
        return start + max(common, default=0)

    def take(
        self, tokens: Sequence[int], salt: str | None = None
    ) -> tuple[int, list[Page], Layers]:
        """The longest known beginning of a prompt.

        Args:
            salt: only what was put with the same one is known.

        Returns:
            Its tokens, the pages that have them, and what the layers keep besides; 0 and nothing if
            none is known. The pages are kept: a row that takes them lends them, and copies the last
            one if it has room for more tokens.
        """
        prompt = array("I", tokens)
        path = self._match(prompt, salt)
        length = 0
        while path and not length:
            start, rest = self._rest(path, prompt)
            last = path[-1]
            near = last.near(rest) if self._cuts else last.children
            found = max(near, key=lambda child: child.usable(rest), default=None)
            if found and (within := found.usable(rest)):
                length = start + within
                path.append(found)
            elif last.states is not None:
                length = start
            else:
                path.pop()
        self._refresh(path)
        pages = [node.page for node in path if node.page]
        return length, pages, self._specs.layers_of(path[-1].states or []) if path else []

    def put(
        self,
        tokens: Sequence[int],
        pages: Sequence[Page],
        layers: Layers,
        salt: str | None = None,
    ) -> None:
        """Keep what a row holds after exactly these tokens.

        Args:
            pages: of the row, from its first.
            layers: what the layers hold besides.

        Raises:
            ValueError: if there are too few pages.
        """
        prompt, positions = array("I", tokens), self._pool.pages.positions
        parts = [prompt[at : at + positions] for at in range(0, len(prompt), positions)]
        if len(pages) < len(parts):
            raise ValueError(f"{len(pages)} pages do not hold {len(prompt)} tokens")
        states = [array for layer in layers for array in layer]
        size = size_of(states)
        if not parts or self._bytes_of(len(parts)) + size > self._most:
            return
        path = [self._roots.setdefault(salt, _Node(array("I"), salt=salt))]
        for part, page in zip(parts, pages, strict=False):
            child = path[-1].child(part)
            if child is None or not (self._cuts or len(child.tokens) == len(part)):
                child = _Node(part, page, path[-1], states=[] if self._cuts else None)
                insort(path[-1].children, child, key=_TOKENS)
                self._pool.pages.keep([page])
            path.append(child)
        self._refresh(path)
        last = path[-1]
        if last.states is None:
            # First, since a node with states stays when all that follows it is dropped.
            last.states, self._states = states, self._states + size
        self.trim()
        if last.states is states:
            last.states = copies(states)

    def limit_to(self, room: int) -> None:
        """Take no more than ``room`` bytes: others need the rest."""
        self.limit = max(0, min(self._most, room))
        self.trim()

    def trim(self) -> None:
        """Drop what is too much since rows have released their pages."""
        # Whoever uses a node uses its parent later, so one pass finds all.
        for node in [*self._nodes] if self.nbytes > self.limit else []:
            if self.nbytes <= self.limit:
                return
            if node in self._nodes and not node.children and node.frees:
                self._drop(node)

    def _bytes_of(self, pages: int) -> int:
        return pages * self._pool.pages.positions * self._specs.token_bytes

    def _match(self, prompt: Tokens, salt: str | None) -> list[_Node]:
        """The nodes of whole pages that a prompt begins with, after the root of its salt."""
        node, path = self._roots.get(salt), list[_Node]()
        while node:
            path.append(node)
            _, rest = self._rest(path, prompt)
            node = node.child(rest) if len(rest) == self._pool.pages.positions else None
        return path

    def _rest(self, path: Sequence[_Node], prompt: Tokens) -> tuple[int, Tokens]:
        """The tokens that a root and whole pages have, and those that a prompt's next page has."""
        positions = self._pool.pages.positions
        start = (len(path) - 1) * positions
        return start, prompt[start : start + positions]

    def _drop(self, node: _Node) -> None:
        """Drop a leaf, and what is useless without it."""
        while node.parent and node.page and not node.children:
            self._pool.pages.drop([node.page])
            self._states -= size_of(node.states or [])
            del self._nodes[node]
            node.parent.children.remove(node)
            node = node.parent
            if node.states is not None:
                return
        if not node.parent and not node.children:
            del self._roots[node.salt]

    def _refresh(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            if node.page:
                self._nodes[node] = None
                self._nodes.move_to_end(node)
