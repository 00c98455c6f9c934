"""Beginnings of prompts that have been read, in a radix tree over token ids.

A node is an edge of tokens. Layers that keep the keys and values of every token can be cut
anywhere; a node has those of its edge. Layers with a sliding window or a recurrent state are known
only where a prompt was put; only the node that ends there has their arrays. So a prompt takes the
longest path to a node with these arrays. If all layers of a model can be cut, it takes any path.

Rows and nodes have array objects of their own. These may share a buffer: MLX copies a shared buffer
when one of them is written to.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from omlx_worker.engine.ragged.prefix_arrays import Forms, Layers, copies, halves, size_of
from omlx_worker.engine.ragged.prefix_disk import Beginning, PrefixDisk, Tokens
from omlx_worker.engine.rows.tokens import in_common


@dataclass(eq=False, slots=True)
class _Node:
    """An edge, and what the layers hold.

    Attributes:
        pieces: keys and values of the edge, ``[1, H, T, D]``, of every layer that can be cut.
        states: the arrays of all other layers after the edge; empty where there are no such layers,
            None where they are not known.
        salt: a hash of the salt of the prompts below a root.
        file_start: the position from which a file holds everything up to the edge's end; None
            without a file.
    """

    tokens: Tokens
    pieces: list[mx.array]
    states: list[mx.array] | None
    parent: _Node | None = None
    salt: str | None = None
    children: dict[int, _Node] = field(default_factory=dict)
    uses: int = 0
    file_start: int | None = None

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
        # Least recently used first.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    def shared(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many tokens of a prompt agree with a kept one, even if `take` finds fewer.

        A row that is put after these tokens lets the next one take all of them.
        """
        return self._match(array("I", tokens), _hashed(salt))[1]

    def take(self, tokens: Sequence[int], salt: str | None = None) -> tuple[int, Layers]:
        """The longest known beginning of a prompt.

        Args:
            salt: only what was put with the same one is known.

        Returns:
            Its tokens, and what the layers keep of them; 0 and nothing if none is known.
        """
        self._take_from_disk()
        prompt, root = array("I", tokens), _hashed(salt)
        path, covered = self._match(prompt, root)
        length, nodes = _held(path, covered)
        if not length:
            return 0, []
        path = path[:nodes]
        layers = self._forms.join([node.pieces for node in path], path[-1].states or [], length)
        self._refresh(path)
        whole = sum(len(node.tokens) for node in path) == length
        self._count_use(path if whole else path[:-1], root)
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
        self._add(Beginning(prompt, 0, _hashed(salt), pieces, states))

    def limit_to(self, room: int) -> None:
        """Take no more than ``room`` bytes: others need the rest."""
        self.limit = max(0, min(self._most, room))
        while self.nbytes > self.limit:
            self._evict()
        self._take_from_disk()

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

    def _add(self, beginning: Beginning, *, from_disk: bool = False) -> None:
        """Keep the end of a prompt and its states, if what comes before it is kept.

        Args:
            from_disk: used less recently than all that is kept, so nothing gives way to it.
        """
        prompt, start, salt = beginning.tokens, beginning.start, beginning.salt
        if beginning.nbytes > self.limit:
            return
        while True:
            path, covered = self._match(prompt, salt)
            if covered < start:
                return
            if not from_disk:
                self._refresh(path)
            within = covered - sum(len(node.tokens) for node in path[:-1])
            new = [piece[..., covered - start :, :] for piece in beginning.pieces]
            ends_here = path and covered == len(prompt) and within == len(path[-1].tokens)
            size = size_of(new)
            if not ends_here or path[-1].states is None:
                size += size_of(beginning.states)
            if self.nbytes + size <= self.limit:
                break
            if from_disk:
                return
            self._evict()

        if path and within < len(path[-1].tokens):
            path[-1] = self._split(path[-1], within)
        if covered < len(prompt):
            root = self._roots.setdefault(salt, _Node(array("I"), [], None, salt=salt))
            parent = path[-1] if path else root
            path.append(_Node(prompt[covered:], copies(new), None, parent))
            parent.children[prompt[covered]] = path[-1]
        if path[-1].states is None:
            path[-1].states = copies(beginning.states)
        self.nbytes += size
        if from_disk:
            path[-1].file_start = start
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
        """Drop the least recently used leaf, and what is useless without it."""
        node = next(node for node in self._nodes if not node.children)
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
        # The longest first: a file that others need is used later than they, and found before them.
        for prompt, start, nodes in reversed(used):
            node = nodes[-1]
            if node.file_start is not None:
                disk.use(prompt, node.file_start, salt)
            elif node.uses > 1:
                columns = zip(*(node.pieces for node in nodes), strict=True)
                pieces = [mx.concatenate(list(column), axis=2) for column in columns]
                if disk.write(Beginning(prompt, start, salt, pieces, node.states or [])):
                    node.file_start = start

    def _take_from_disk(self) -> None:
        """Take what was read from the disk meanwhile."""
        while self._disk and not self._disk.found.empty():
            self._add(self._disk.found.get(), from_disk=True)


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
