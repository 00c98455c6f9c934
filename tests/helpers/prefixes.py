"""Scripts of reading, dropping and restarting, which a prefix cache must survive unseen."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from omlx_worker.engine.ragged.prefix import PrefixCache, _hashed, _held
from omlx_worker.engine.ragged.prefix_arrays import Layers
from omlx_worker.engine.ragged.prefix_disk import PrefixDisk
from tests.helpers.readers import Reader, read_all, read_on, read_through

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
RESTARTS = st.tuples(st.just("restart"), st.none(), st.none())


def equal(ours: list[mx.array], theirs: list[mx.array], tolerance: float = 0) -> bool:
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance))
        for a, b in zip(ours, theirs, strict=True)
    )


def findable(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> int:
    """How many tokens of a prompt `take` would find. It counts no use."""
    cache.limit_to(cache.limit)  # takes what was read from the disk
    return _held(*cache._match(array("I", tokens), _hashed(salt)))[0]


def give_up(cache: PrefixCache, size: int) -> int:
    """Let a cache drop that many bytes or a little more; returns how many it has dropped."""
    before, limit = cache.nbytes, cache.limit
    cache.limit_to(before - size)
    cache.limit_to(limit)
    return before - cache.nbytes


def play(
    reader: Reader, script: list[Any], start: Callable[[], PrefixCache], tolerance: float = 0
) -> None:
    """Read prompts, drop nodes, restart: every row is and stays what it is if read cold."""
    cache = start()
    asked: list[list[int]] = []
    rows: list[Layers] = []
    for act, what, chunk in script:
        if act == "restart":
            cache = start()
        elif act == "drop":
            with poisoning(cache):
                give_up(cache, int(what * cache.nbytes))
        else:
            like, length, rest = what
            begin = asked[like % len(asked)] if asked else [0, 1, 2] * 3
            asked.append([*begin[:length], *rest])
            with poisoning(cache):
                rows.append(read_through(cache, reader, asked[-1], chunk))
        check_tree(cache)
    cold = {tuple(prompt): read_all(reader, prompt) for prompt in asked}
    for prompt, layers in zip(asked, rows, strict=True):
        wanted = reader.arrays(cold[tuple(prompt)])
        assert equal(reader.arrays(layers), wanted, tolerance), prompt
    # Rows write to their caches in place, which must not reach the tree.
    for prompt, layers in zip(asked, rows, strict=True):
        read_on(reader, [*prompt, 0, 1], len(prompt), layers, 1)
    for prompt in asked:
        length, layers = cache.take(prompt)
        if length:
            wanted = reader.arrays(read_all(reader, prompt[:length]))
            assert equal(reader.arrays(layers), wanted, tolerance), prompt[:length]


def check_tree(cache: PrefixCache) -> None:
    nodes = list(cache._nodes)
    assert cache.nbytes == sum(node.nbytes for node in nodes) <= cache.limit
    assert all(node.children or node.states is not None for node in nodes), "a useless node"
    roots = list(cache._roots.values())
    assert all(root.children for root in roots), "a useless root"
    reachable, below = 0, roots
    while below:
        children = below.pop().children.values()
        below += children
        reachable += len(children)
    assert reachable == len(nodes)


@contextmanager
def poisoning(cache: PrefixCache) -> Iterator[None]:
    """Fill what the block drops with NaN."""
    before = list(cache._nodes)
    yield
    if cache._disk:
        settle(cache._disk)  # files are written from these arrays, which nothing else changes
    for node in before:
        if node not in cache._nodes:
            for part in [*node.pieces, *(node.states or [])]:
                part[...] = mx.nan


def settle(disk: PrefixDisk) -> None:
    """Wait until a disk has read and written everything so far."""
    done = Event()
    disk._tasks.put(done.set)
    assert done.wait(60)


class Starts:
    """Caches over one folder, each made when the one before it has ended."""

    def __init__(self, folder: Path, reader: Reader) -> None:
        self.folder = folder
        self.reader = reader
        self._disk: PrefixDisk | None = None

    def __call__(
        self,
        identity: str = "a model",
        limit: int = AMPLE,
        memory: int = AMPLE,
        reader: Reader | None = None,
    ) -> PrefixCache:
        self.end()
        forms = (reader or self.reader).forms
        self._disk = PrefixDisk(self.folder, identity, limit, forms, memory)
        settle(self._disk)
        return PrefixCache(forms, memory, self._disk)

    def end(self) -> None:
        if self._disk:
            self._disk.close()
        self._disk = None

    @property
    def files(self) -> list[Path]:
        """Those kept, the least recently used first."""
        self.end()
        found = self.folder.glob("*/*.safetensors")
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def put(
    cache: PrefixCache,
    reader: Reader,
    prompt: list[int],
    times: int = 2,
    salt: str | None = None,
) -> None:
    for _ in range(times):
        cache.put(prompt, read_all(reader, prompt), salt)
