"""Beginnings of prompts that have been read, in a radix tree over token ids.

A node is an edge of tokens. Layers that keep the keys and values of every token can be cut
anywhere; a node has those of its edge. Layers with a sliding window or a recurrent state are known
only where a prompt was put; only the node that ends there has their arrays. So a prompt takes the
longest path to a node with these arrays. If all layers of a model can be cut, it takes any path.

Rows and nodes have array objects of their own. These may share a buffer: MLX copies a shared buffer
when one of them is written to.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from omlx_worker.engine.ragged.prefix_arrays import Forms, Layers, copies, halves, size_of
from omlx_worker.engine.ragged.prefix_disk import PrefixDisk
from omlx_worker.engine.ragged.prefix_file import Tokens, farthest
from omlx_worker.engine.tokens import in_common


@dataclass(eq=False, slots=True)
class _Node:
    """An edge, and what the layers hold.

    Attributes:
        pieces: keys and values of the edge, ``[1, H, T, D]``, of every layer that can be cut.
        states: the arrays of all other layers after the edge; empty where there are no such layers,
            None where they are not known.
        salt: of the prompts below a root.
    """

    tokens: Tokens
    pieces: list[mx.array]
    states: list[mx.array] | None
    parent: _Node | None = None
    salt: str | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    uses: int = 0

    @property
    def nbytes(self) -> int:
        return size_of(self.pieces) + size_of(self.states or [])

    @property
    def can_be_cut(self) -> bool:
        """Whether a prompt may take only the first tokens of the edge."""
        return self.states is not None and not self.states


class PrefixCache:
    """What rows have read, for rows that begin alike. It belongs to the decode thread.

    Args:
        forms: of what the model's layers keep.
        most: bytes; 0 keeps nothing. The least recently used are dropped.
        disk: where beginnings that were used twice are written.

    Attributes:
        limit: bytes, at present.
        nbytes: of all arrays kept.
    """

    def __init__(self, forms: Forms, most: int, disk: PrefixDisk | None = None) -> None:
        self._forms = forms
        self._most = self.limit = most
        self.nbytes = 0
        self._disk = disk
        # One for each salt that anything is kept of.
        self._roots: dict[str | None, _Node] = {}
        # Least recently used first. Every node is used later than those below it.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    def shared(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of a prompt agree with a kept one, even if `take` finds fewer.

        A row that is put after these tokens lets the next one take all of them.
        """
        return self._match(array("I", tokens), salt)[1]

    def take(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, Layers]:
        """The longest known beginning of a prompt.

        Args:
            salt: only what was put with the same one is known.

        Returns:
            Its tokens, and what the layers keep of them; 0 and nothing if none is known.
        """
        prompt = array("I", tokens)
        if self._disk:
            self._load(self._disk, prompt, salt)
        path, covered = self._match(prompt, salt)
        length, depth = _held(path, covered)
        if not length:
            return 0, []
        path = path[:depth]
        layers = self._forms.join([node.pieces for node in path], path[-1].states or [], length)
        self._refresh(path)
        whole = sum(len(node.tokens) for node in path) == length
        self._count_use(path if whole else path[:-1], salt)
        return length, layers

    def put(self, tokens: Sequence[int], layers: Layers, salt: str | None = None) -> None:
        """Keep what the layers hold after exactly these tokens.

        Raises:
            ValueError: if they hold another number of tokens.
        """
        prompt = array("I", tokens)
        if not prompt or not self.limit:
            return
        pieces, states = self._forms.split(layers)
        if any(piece.shape[2] != len(prompt) for piece in pieces):
            raise ValueError(f"the layers do not hold {len(prompt)} tokens")
        self._add(prompt, salt, 0, pieces, states)

    def limit_to(self, room: int) -> None:
        """Take no more than ``room`` bytes: others need the rest."""
        self.limit = max(0, min(self._most, room))
        while self.nbytes > self.limit:
            self._evict()

    def close(self) -> None:
        """Write what waits to be written."""
        if self._disk:
            self._disk.close()

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
        start: int,
        pieces: list[mx.array],
        states: list[mx.array],
    ) -> bool:
        """Keep the end of a prompt, from ``start``, and its states; False if that is impossible."""
        if size_of(pieces) + size_of(states) > self.limit:
            return False
        while True:
            path, covered = self._match(prompt, salt)
            if covered < start:
                return False
            self._refresh(path)
            within = covered - sum(len(node.tokens) for node in path[:-1])
            new = [piece[..., covered - start :, :] for piece in pieces]
            ends_here = path and covered == len(prompt) and within == len(path[-1].tokens)
            size = size_of(new)
            if not ends_here or path[-1].states is None:
                size += size_of(states)
            if self.nbytes + size <= self.limit:
                break
            self._evict()

        if path and within < len(path[-1].tokens):
            path[-1] = self._split(path[-1], within)
        if covered < len(prompt):
            root = self._roots.setdefault(salt, _Node(array("I"), [], None, salt=salt))
            parent = path[-1] if path else root
            path.append(_Node(prompt[covered:], copies(new), None, parent))
            parent.children[prompt[covered]] = path[-1]
        if path[-1].states is None:
            path[-1].states = copies(states)
        self.nbytes += size
        self._refresh(path)
        self._count_use(path, salt)
        return True

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut an edge in two; returns the upper one."""
        assert node.parent
        above, below = halves(node.pieces, at)
        upper = _Node(
            node.tokens[:at],
            above,
            [] if node.can_be_cut else None,
            node.parent,
            children={node.tokens[at]: node},
            uses=node.uses,
        )
        node.parent.children[node.tokens[0]] = upper
        node.parent = upper
        node.tokens, node.pieces = node.tokens[at:], below
        return upper

    def _evict(self) -> None:
        """Drop the least recently used node, which is a leaf, and what is useless without it."""
        node = next(iter(self._nodes))
        while True:
            assert node.parent
            self.nbytes -= node.nbytes
            del self._nodes[node]
            del node.parent.children[node.tokens[0]]
            node = node.parent
            if node.parent is None and not node.children:
                del self._roots[node.salt]
            if node.parent is None or node.children or node.states is not None:
                return

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
        # The longest first, so that files go before those that need them.
        for prompt, start, nodes in reversed(used):
            if nodes[-1].uses > 1 and not disk.touch(prompt, start, salt):
                columns = zip(*(node.pieces for node in nodes), strict=True)
                pieces = [mx.concatenate(list(column), axis=2) for column in columns]
                disk.write(prompt, start, pieces, nodes[-1].states or [], salt)

    def _load(self, disk: PrefixDisk, prompt: Tokens, salt: str | None) -> None:
        """Read files from which more can be taken than from the tree."""
        path, covered = self._match(prompt, salt)
        if _held(path, covered)[0] == len(prompt):
            return
        spans = disk.matching(prompt, salt)
        while spans and (span := farthest(spans, covered)) and span.end > _held(path, covered)[0]:
            spans.remove(span)
            found = disk.load(span, prompt)
            if found and not self._add(prompt[: span.end], salt, span.start, *found):
                return
            path, covered = self._match(prompt, salt)


def _held(path: Sequence[_Node], covered: int) -> tuple[int, int]:
    """How much of a path can be taken, if a prompt agrees with it for ``covered`` tokens.

    Returns:
        Tokens, and how many nodes of the path have them.
    """
    held = end = depth = 0
    for at, node in enumerate(path, 1):
        end += len(node.tokens)
        if node.states is not None and (end <= covered or node.can_be_cut):
            held, depth = min(end, covered), at
    return held, depth
