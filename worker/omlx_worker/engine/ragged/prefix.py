"""Beginnings of prompts that have been read, in a radix tree over token ids.

A node is an edge of tokens. It keeps the pages that hold the edge's keys and values, which rows
have too: nothing is copied, and what rows share is in the pool once. Two nodes that meet within a
page both have it, or each has one of its own with the same beginning.

Layers with a sliding window or a recurrent state are known only where a prompt was put; only the
node that ends there has their arrays. So a prompt takes the longest path to a node with these
arrays. If all layers of a model have pages, it takes any path.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx

from omlx_worker.engine.caches.layout import Page
from omlx_worker.engine.models.ragged_model import Layers
from omlx_worker.engine.ragged.batch import Batch
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs, copies, size_of
from omlx_worker.engine.ragged.prefix_disk import Beginning, PrefixDisk, Tokens
from omlx_worker.engine.rows.tokens import in_common


@dataclass(eq=False, slots=True)
class _Node:
    """An edge, and what the layers hold.

    Attributes:
        start: the position of its first token.
        pages: those that have its positions; the first one may have earlier ones too.
        states: the arrays of layers without pages after the edge; empty where there are no such
            layers, None where they are not known.
        salt: a hash of the salt of the prompts below a root.
        file_start: the position from which a file holds everything up to the edge's end; None
            without a file.
    """

    tokens: Tokens
    start: int
    pages: list[Page]
    states: list[mx.array] | None
    parent: _Node | None = None
    salt: str | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    uses: int = 0
    file_start: int | None = None

    @property
    def can_be_cut(self) -> bool:
        """Whether a prompt may take only the first tokens of the edge."""
        return self.states is not None and not self.states

    @property
    def frees(self) -> bool:
        """Whether memory is free when it goes: what rows have stays."""
        return bool(self.states) or any(not page.rows for page in self.pages)


class PrefixCache:
    """What rows have read, for rows that begin alike. It belongs to the decode thread.

    Args:
        specs: of what the model's layers keep.
        most: bytes; 0 keeps nothing. The least recently used are dropped.
        pool: whose pages are kept.
        disk: where beginnings that were used twice are written.

    Attributes:
        limit: bytes, at present.
    """

    def __init__(
        self, specs: LayerSpecs, most: int, pool: Batch, disk: PrefixDisk | None = None
    ) -> None:
        self._specs = specs
        self._most = self.limit = most
        self._pool = pool
        self._disk = disk
        self._states = 0
        # One for each salt that anything is kept of.
        self._roots: dict[str | None, _Node] = {}
        # Least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all states kept, and of pages that no row has."""
        return self._states + self._bytes_of(self._pool.pages.alone)

    def shared(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of a prompt agree with a kept one, even if `take` finds fewer.

        A row that is put after these tokens lets the next one take all of them.
        """
        return self._match(array("I", tokens), _hashed(salt))[1]

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
        self._take_from_disk()
        prompt, root = array("I", tokens), _hashed(salt)
        path, covered = self._match(prompt, root)
        length, nodes = _held(path, covered)
        if not length:
            return 0, [], []
        path = path[:nodes]
        pages = self._pages_of(path)[: self._count(length)]
        layers = self._specs.layers_of(path[-1].states or [])
        self._refresh(path)
        whole = sum(len(node.tokens) for node in path) == length
        self._count_use(path if whole else path[:-1], root)
        return length, pages, layers

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
        prompt, count = array("I", tokens), self._count(len(tokens))
        if len(pages) < count:
            raise ValueError(f"{len(pages)} pages do not hold {len(prompt)} tokens")
        states = [array for layer in layers for array in layer]
        size = self._bytes_of(count) + size_of(states)
        if prompt and self._most and size <= self._most:
            kept = list(pages[:count])
            self._add(prompt, _hashed(salt), states, lambda _, at: kept[self._index(at) :])

    def limit_to(self, room: int) -> None:
        """Take no more than ``room`` bytes: others need the rest."""
        self.limit = max(0, min(self._most, room))
        self.trim()
        self._take_from_disk()

    def trim(self) -> None:
        """Drop what is too much since rows have released their pages."""
        while self.nbytes > self.limit and self._evict():
            pass

    def close(self) -> None:
        """Write what waits to be written."""
        if self._disk:
            self._disk.close()

    # Pages.

    def _bytes_of(self, pages: int) -> int:
        return pages * self._pool.pages.positions * self._specs.token_bytes

    def _index(self, position: int) -> int:
        """Which page of a row has this position."""
        return position // self._pool.pages.positions

    def _count(self, positions: int) -> int:
        return -(-positions // self._pool.pages.positions)

    def _pages_of(self, path: Sequence[_Node]) -> list[Page]:
        """The pages of a path, from its first node's on."""
        pages = list[Page]()
        first = self._index(path[0].start)
        for node in path:
            # Where two nodes meet within a page, the lower one's has the tokens of both.
            pages[self._index(node.start) - first :] = node.pages
        return pages

    # The tree.

    def _match(self, prompt: Tokens, salt: str | None) -> tuple[list[_Node], int]:
        """The nodes that agree with a prompt, the last one perhaps in part, and their tokens in
        common."""
        path: list[_Node] = []
        node, done = self._roots.get(salt), 0
        while node and done < len(prompt) and (child := node.children.get(prompt[done])):
            path.append(child)
            agreeing = in_common(child.tokens, prompt[done : done + len(child.tokens)])
            done += agreeing
            if agreeing < len(child.tokens):
                break
            node = child
        return path, done

    def _add(
        self,
        prompt: Tokens,
        salt: str | None,
        states: Sequence[mx.array],
        pages_from: Callable[[Sequence[_Node], int], Sequence[Page]],
        file_start: int | None = None,
    ) -> None:
        """Keep the end of a prompt and its states, if what comes before it is kept.

        Args:
            pages_from: the pages that have what follows a path, from a position on.
            file_start: the position from which a file on disk has all of it. Then it was used less
                recently than all that is kept, so nothing gives way to it. None for a row's.
        """
        from_disk = file_start is not None
        while True:
            path, covered = self._match(prompt, salt)
            if covered < (file_start or 0):
                return
            if not from_disk:
                self._refresh(path)
            within = covered - path[-1].start if path else 0
            ends_here = path and covered == len(prompt) and within == len(path[-1].tokens)
            own = 0 if ends_here and path[-1].states is not None else size_of(states)
            size = own
            if from_disk:
                size += self._bytes_of(self._count(len(prompt)) - self._index(covered))
            if self.nbytes + size <= self.limit:
                break
            if from_disk or not self._evict():
                return

        if path and within < len(path[-1].tokens):
            path[-1] = self._split(path[-1], within)
        if covered < len(prompt):
            root = self._roots.setdefault(salt, _Node(array("I"), 0, [], None, salt=salt))
            parent = path[-1] if path else root
            pages = list(pages_from(path, covered))
            self._pool.pages.keep(pages)
            path.append(_Node(prompt[covered:], covered, pages, None, parent))
            parent.children[prompt[covered]] = path[-1]
            if from_disk:
                self._pool.pages.release(list(pages))
        if path[-1].states is None:
            path[-1].states = copies(states)
        self._states += own
        if from_disk:
            path[-1].file_start = file_start
            for node in path:
                if node not in self._nodes:
                    self._nodes[node] = None
                    self._nodes.move_to_end(node, last=False)
        else:
            self._refresh(path)
            self._count_use(path, salt)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge in two; returns the upper one."""
        assert node.parent
        middle, first = node.start + at, self._index(node.start)
        upper = _Node(
            node.tokens[:at],
            node.start,
            node.pages[: self._count(middle) - first],
            [] if node.can_be_cut else None,
            node.parent,
            children={node.tokens[at]: node},
            uses=node.uses,
        )
        node.parent.children[node.tokens[0]] = upper
        node.parent = upper
        node.tokens, node.start = node.tokens[at:], middle
        node.pages = node.pages[self._index(middle) - first :]
        if middle % self._pool.pages.positions:
            self._pool.pages.keep(node.pages[:1])
        return upper

    def _evict(self) -> bool:
        """Drop the least recently used leaf that frees memory, and what is useless without it.

        Returns:
            Whether there was one.
        """
        leaves = (node for node in self._nodes if not node.children and node.frees)
        node = next(leaves, None)
        if node is None:
            return False
        while True:
            assert node.parent
            self._pool.pages.drop(node.pages)
            self._states -= size_of(node.states or [])
            del self._nodes[node]
            del node.parent.children[node.tokens[0]]
            node = node.parent
            if node.parent is None and not node.children:
                del self._roots[node.salt]
            if node.parent is None or node.children or node.states is not None:
                return True

    def _refresh(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    # The disk.

    def _count_use(self, path: Sequence[_Node], salt: str | None) -> None:
        for node in path:
            node.uses += 1
        if self._disk:
            self._write(self._disk, path, salt)

    def _write(self, disk: PrefixDisk, path: Sequence[_Node], salt: str | None) -> None:
        """Write the nodes that were used twice, each from the last end with states above it."""
        prompt, start, between = array("I"), 0, list[_Node]()
        used = []
        for node in path:
            prompt = prompt + node.tokens
            between.append(node)
            if node.states is not None:
                used.append((prompt, start, between))
                start, between = len(prompt), []
        # The longest first: a file that others need is used later than they, and found before them.
        for prompt, start, nodes in reversed(used):
            node = nodes[-1]
            if node.file_start is not None:
                disk.use(prompt, node.file_start, salt)
            elif node.uses > 1:
                pieces = self._pool.pieces(self._pages_of(nodes), start, len(prompt))
                if disk.write(Beginning(prompt, start, salt, pieces, node.states or [])):
                    node.file_start = start

    def _take_from_disk(self) -> None:
        """Take what was read from the disk meanwhile."""
        while self._disk and not self._disk.found.empty():
            found = self._disk.found.get()
            pages_from = partial(self._written, found)
            self._add(found.tokens, found.salt, found.states, pages_from, found.start)

    def _written(self, found: Beginning, path: Sequence[_Node], at: int) -> list[Page]:
        """New pages with what a file has, from a position on."""
        pieces = [piece[..., at - found.start :, :] for piece in found.pieces]
        if before := at % self._pool.pages.positions:
            # The first one begins like the path's last one.
            begun = self._pool.pieces(path[-1].pages[-1:], at - before, at)
            pieces = [
                mx.concatenate(list(pair), axis=2) for pair in zip(begun, pieces, strict=True)
            ]
        return self._pool.filled(pieces, len(found.tokens) - at + before)


def _hashed(salt: str | None) -> str | None:
    """A name for a salt that does not tell it: names of roots go to the disk."""
    return None if salt is None else hashlib.sha256(salt.encode()).hexdigest()


def _held(path: Sequence[_Node], covered: int) -> tuple[int, int]:
    """How much of a path can be taken, if a prompt agrees with it for ``covered`` tokens.

    Returns:
        Tokens, and how many nodes of the path have them.
    """
    held = end = nodes = 0
    for at, node in enumerate(path, 1):
        end += len(node.tokens)
        if node.states is not None and (end <= covered or node.can_be_cut):
            held, nodes = min(end, covered), at
    return held, nodes
