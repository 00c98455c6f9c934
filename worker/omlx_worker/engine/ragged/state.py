"""The state of a step: arrays with a leading axis of slots, of which each row has one.

``pending``       the token sampled last, not in the cache yet
``cursors``       tokens in the cache, which is the pending token's index in the history
``body_lengths``  how many of them are in the attention bodies
``shifts``        from ``cursors`` to rotary positions, behind which pictures leave a row
``accepted``      drafts accepted in the last window, not yet replayed by recurrent layers
``offered``       how many of ``drafts`` may be accepted; 0 until the row's first step
``source``        who made them: an index of `SOURCES`
``drafts``        ``[S, K]``, judged by the next step; absent without drafts
``counts``        ``[S, V]``, how often each token occurs in the history; only with penalties
``history``       see `omlx_worker.engine.ragged.lookups`; only if drafts are looked up
``table``         ``[S, M]``, the pages of the attention bodies
``entries``       ``[E]``, the indices of the flat table that name a page, padded with -1

A row without a slot has its part of them, ``[1, ...]``, but for ``table`` and ``entries``, which
are made from its pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from omlx_worker.engine.ragged.lookups import history_of
from omlx_worker.engine.ragged.sampling import counts_of
from omlx_worker.engine.rows.row import Row

State = dict[str, mx.array]

_NUMBERS = ("pending", "cursors", "body_lengths", "shifts", "accepted", "offered", "source")
"""``[S]`` int32 each."""

_LISTS = ("table", "entries")

_CUT = ("drafts", "history")
"""Arrays whose second axis differs between batches."""


def empty_state(slots: int, history: int = 0) -> State:
    """The state of slots without rows.

    Args:
        history: tokens of each slot's; 0 for none.
    """
    state = {name: mx.zeros((slots,), mx.int32) for name in _NUMBERS}
    return state | ({"history": mx.zeros((slots, history), mx.int32)} if history else {})


def first_state(row: Row, vocabulary: int, *, looks_up: bool) -> State:
    """The part of a row that has not decoded: its last token is pending, the others are read."""
    tokens = row.tokens[: row.committed]
    last = len(tokens) - 1
    numbers = {"pending": tokens[last], "cursors": last, "body_lengths": last}
    numbers["shifts"] = row.shift_at(last)
    state = {name: mx.array([numbers.get(name, 0)], mx.int32) for name in _NUMBERS}
    if looks_up:
        state["history"] = history_of(tokens)
    if row.sampling.penalises:
        state["counts"] = counts_of(tokens, vocabulary)[None]
    return state


def part_of(state: State, slot: int, *, counts: bool) -> State:
    """The part of the row in a slot.

    Args:
        counts: whether it needs those of its tokens.
    """
    own = mx.array([slot])
    part = {name: array[own] for name, array in without_pages(state).items()}
    return part if counts else {name: part[name] for name in part if name != "counts"}


def write(state: State, slot: int, part: State) -> None:
    """Write a row's part to its slot, with as many of its drafts as there is room for."""
    for name, value in part.items():
        if name in _CUT and name in state:
            width = min(value.shape[1], state[name].shape[1])
            state[name][slot, :width] = value[0, :width]
        elif name in state:
            state[name][slot] = value[0]
    room = state["drafts"].shape[1] if "drafts" in state else 0
    state["offered"][slot] = mx.minimum(part["offered"][0], room)


def clear(state: State, slot: int) -> None:
    """Leave a slot without a row: else steps would write past its tail."""
    for name in ("cursors", "body_lengths"):
        state[name][slot] = 0


def without_pages(state: State) -> State:
    """The state without ``table`` and ``entries``."""
    return {name: array for name, array in state.items() if name not in _LISTS}


def moved(state: State, moves: Sequence[int | None]) -> State:
    """The state of other slots, each with the row that ``moves`` names, if any, `without_pages`."""
    slots = mx.array([slot or 0 for slot in moves], mx.int32)
    taken = mx.array([slot is not None for slot in moves])
    after = {name: array[slots] for name, array in without_pages(state).items()}
    return after | {name: after[name] * taken for name in ("cursors", "body_lengths")}
