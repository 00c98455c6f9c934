"""Where the weights of a small Qwen3.5 go in a larger one that computes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Map = np.ndarray
"""For each index of a grown axis, the index of the old axis that it takes after, or -1."""


def copies(old: int, new: int) -> Map:
    """The old axis again and again."""
    return np.arange(new) % old


def first(old: int, new: int) -> Map:
    """The old axis once, then nothing."""
    return np.where(np.arange(new) < old, np.arange(new), -1)


def second(old: int, new: int) -> Map:
    """Nothing, then the old axis once, then nothing."""
    return np.where(np.arange(new) < old, -1, first(2 * old, new) - old).clip(-1)


def nested(outer: Map, inner: Map, size: int) -> Map:
    """Blocks by one map, each of ``size`` old elements laid out by another."""
    both = outer[:, None] * size + inner[None]
    return np.where((outer[:, None] >= 0) & (inner[None] >= 0), both, -1).reshape(-1)


def grouped(old: int, new: int, old_shared: int, new_shared: int) -> tuple[Map, Map]:
    """Where heads go, and the heads that groups of them share, so that each keeps its own."""
    per, now = old // old_shared, new // new_shared
    heads = np.full(new, -1)
    places = [h // per * now + h % per if now >= per else h for h in range(old)]
    heads[places] = np.arange(old)
    shared = np.full(new_shared, -1)
    for place, head in zip(places, range(old), strict=True):
        shared[place // now] = head // per
    return heads, shared


def turned(old: int, new: int, old_rotary: int, new_rotary: int) -> tuple[Map, np.ndarray]:
    """Where the elements of a head go that rotates more of them, and which new ones are in use.

    Rotary embeddings pair an element with the one half their number further on, and turn pair
    ``i`` of ``n`` by the base to the ``-i / n``: with four times as many, old pairs turn as before
    at every fourth place. The elements not in use are copies, which keep the mean square.
    """
    half, apart = old_rotary // 2, new_rotary // old_rotary
    index = np.arange(old)
    places = np.where(index < half, index, index - half) * apart
    places[half:old_rotary] += new_rotary // 2
    places[old_rotary:] = new_rotary + index[old_rotary:] - old_rotary
    used = np.isin(np.arange(new), places)
    elements = np.empty(new, int)
    elements[places] = index
    elements[~used] = copies(old, new - old)
    return elements, used


@dataclass
class Layout:
    """How axes of the grown model follow from the demo's.

    Hidden states are copies of the old one side by side: their mean square, and so every norm,
    is what it was. Whatever writes them writes all copies, whatever reads them reads the first;
    but of the state that it goes on from the head reads the second, where its norm can make drafts
    wrong that come after others only.
    Queries and keys of attention are copies as well, but the keys' norm lets one through, whose
    elements lie where they are turned as they were (`turned`).
    Queries of recurrent layers are two copies and their keys one, which halves what is read;
    values are copies, and the norm after them, whose epsilon is a quarter, undoes it.
    The last place of the hidden state, if tokens were added, is a constant that they score by.
    """

    old: Any
    new: Any

    def __post_init__(self) -> None:
        old, new = self.old, self.new
        self.writes = copies(old.hidden_size, new.hidden_size)
        self.reads = first(old.hidden_size, new.hidden_size)
        self.goes_on = second(old.hidden_size, new.hidden_size)
        self.padded = new.vocab_size > old.vocab_size
        if self.padded:
            self.writes[-1] = -1
        self.mlp = first(old.intermediate_size, new.intermediate_size)
        self.tokens = first(old.vocab_size, new.vocab_size)
        heads, shared = grouped(
            old.num_attention_heads,
            new.num_attention_heads,
            old.num_key_value_heads,
            new.num_key_value_heads,
        )
        dim, wide = old.head_dim, new.head_dim
        gate = first(dim, wide)
        rotary = (old.partial_rotary_factor, new.partial_rotary_factor)
        self.head, self.used = turned(dim, wide, int(dim * rotary[0]), int(wide * rotary[1]))
        query_and_gate = np.concatenate([self.head, np.where(gate < 0, -1, dim + gate)])
        self.queries = nested(heads, query_and_gate, 2 * dim)
        self.keys = nested(shared, self.head, dim)
        self.values = nested(shared, first(dim, wide), dim)
        self.attended = nested(heads, first(dim, wide), dim)
        self._recurrent()

    def _recurrent(self) -> None:
        old, new = self.old, self.new
        self.states, shared = grouped(
            old.linear_num_value_heads,
            new.linear_num_value_heads,
            old.linear_num_key_heads,
            new.linear_num_key_heads,
        )
        key, wide_key = old.linear_key_head_dim, new.linear_key_head_dim
        value, wide_value = old.linear_value_head_dim, new.linear_value_head_dim
        queries = nested(shared, copies(key, wide_key), key)
        keys = nested(shared, first(key, wide_key), key)
        # A key's other half has to be nothing, not something random.
        self.silent = np.repeat(shared >= 0, wide_key) & (keys < 0)
        self.gates = nested(self.states, copies(value, wide_value), value)
        key_width = old.linear_num_key_heads * key
        parts = [(queries, 0), (keys, key_width), (self.gates, 2 * key_width)]
        self.qkv = np.concatenate([np.where(m < 0, -1, m + offset) for m, offset in parts])
        self.silent = np.pad(self.silent, (len(queries), len(self.gates)))
        self.mixed = nested(self.states, first(value, wide_value), value)
        self.value = copies(value, wide_value)


def grown_layers(old: int, new: int, interval: int) -> list[int]:
    """Which old layer each new one is, or -1; both kinds of layers keep to their places."""
    blocks, wanted = old // interval, new // interval
    at = {round(b * (wanted - 1) / max(blocks - 1, 1)): b for b in range(blocks)}
    return [at.get(n // interval, -blocks) * interval + n % interval for n in range(new)]
