"""Constrained rows beside the step: what each may sample at each place of its window.

A matcher follows a row's committed tokens through its grammar. For the places after the first of a
window it looks ahead along the row's drafts, which are read back from the device. A draft that the
grammar forbids is never accepted, so places after it need no mask.

Where a grammar leaves one way to go on, its tokens are forced: they are certain to be accepted. So
for tokens that a row may sample next, the forced ones after them go to the device. There those
after the token that was sampled become the row's next drafts, in place of the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from omlx_worker.engine.constraints import Grammar
from omlx_worker.engine.ragged.lookups import merged
from omlx_worker.engine.ragged.step import State

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

BITS = 32
"""Tokens in one word of a mask."""

FEW = 16
"""Tokens of the largest mask for which it is worth finding out what each token would force."""

MOST_RUNS = 16
"""Forced runs of a row and step that go to the device."""


class Run(NamedTuple):
    """Tokens that are forced after one that a row may sample.

    Attributes:
        place: of the window, where the token is sampled.
    """

    place: int
    token: int
    forced: list[int]


class Matcher:
    """One row's way through its grammar.

    Args:
        generated: the tokens that the row starts with.

    Attributes:
        inner: llguidance's own.
        vocabulary: tokens that its masks cover.
        ends: its end tokens.
        failed: whether the row cannot go on: its text left the grammar, or the grammar took more
            than a step may take. The row ends as if cut by its token limit.
    """

    def __init__(self, grammar: Grammar, generated: Sequence[int] = ()) -> None:
        self.inner = grammar.start.deep_copy()
        self.vocabulary = grammar.vocabulary
        self.ends = grammar.ends
        self.failed = False
        self.commit(generated)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens that the row has committed. Those after an end token are ignored."""
        taken = self.inner.try_consume_tokens(list(tokens))
        self.failed |= self.inner.is_error()
        self.failed |= taken < len(tokens) and not self.inner.is_stopped()

    def ahead(self, drafts: Sequence[int]) -> list[int]:
        """The drafts of a window up to the first that the grammar forbids or that ends the text."""
        ends = (at for at, draft in enumerate(drafts) if draft in self.ends)
        drafts = list(drafts[: next(ends, len(drafts))])
        return drafts[: self.inner.validate_tokens(drafts)]

    def runs(self, drafts: Sequence[int], bits: NDArray[np.uint32]) -> list[Run]:
        """What is forced after tokens that the row may sample in its window.

        Args:
            drafts: from `ahead`. Where the next of them is sampled, the window goes on.
            bits: the masks of the places before, between and after them, ``[W, words]``.
        """
        inner, found = self.inner.deep_copy(), list[Run]()
        for place in range(len(drafts) + 1):
            following = list(drafts[place : place + 1])
            for token in _few(bits[place]):
                # An end token would not be rolled back.
                if token in self.ends or token in following:
                    continue
                inner.consume_token(token)
                if forced := inner.compute_ff_tokens():
                    found.append(Run(place, token, forced))
                inner.rollback(1)
            inner.consume_tokens(following)
        return found


class Masks:
    """The masks and forced tokens of one step.

    Args:
        rows: the constrained ones, with their slots.
        vocabulary: entries of the model's logits.
    """

    def __init__(self, rows: Sequence[tuple[int, Matcher]], vocabulary: int) -> None:
        self._rows = rows
        self._vocabulary = vocabulary
        self._forced = mx.array(0)

    def fill(self, state: State, depth: int) -> mx.array:
        """Read the rows' drafts, fill their masks, and find the tokens that are forced next.

        Args:
            state: of the step that is under way; the last step's tokens are committed.
            depth: drafts that the next step may judge.

        Returns:
            ``[S, W, V / 32 or more]`` uint32; a set bit allows a token, the lowest bit first.
        """
        drafts = np.array(state["drafts"]) if "drafts" in state else np.zeros((0, 0), np.int32)
        offered = np.array(state["drafted"])
        rows = [(slot, matcher) for slot, matcher in self._rows if not matcher.failed]
        windows = [
            matcher.ahead(drafts[slot, : offered[slot]].tolist() if offered[slot] else [])
            for slot, matcher in rows
        ]
        words = max(-(-matcher.vocabulary // BITS) for _, matcher in self._rows)
        # One mask for all free rows, then one for each constrained row.
        bits = np.full((1 + len(rows), 1 + drafts.shape[1], words), -1, np.int32)
        _fill(bits, [(m.inner, window) for (_, m), window in zip(rows, windows, strict=True)])
        chosen = np.zeros(len(offered), np.int32)
        runs: dict[int, list[Run]] = {}
        seen = bits.view(np.uint32)
        for index, ((slot, matcher), window) in enumerate(zip(rows, windows, strict=True), 1):
            matcher.failed |= matcher.inner.is_error()
            chosen[slot] = index
            if depth and not matcher.failed:
                runs[slot] = matcher.runs(window, seen[index])
        self._forced = packed(runs, len(offered), depth)
        return mx.array(seen)[mx.array(chosen)]

    def force(self, state: State, limits: mx.array, depth: int, *, ratio: bool) -> State:
        """Replace drafts by forced tokens in the state after the step; returns the new state.

        Args:
            limits: ``[S]`` int32, drafts of each row, at most.
            depth: drafts that the next step may judge.
            ratio: whether a row's drafts are judged by the `ratio` rule.
        """
        vocabulary = self._vocabulary if ratio else 0
        return force(state, self._forced, limits, depth, vocabulary) if depth else state


def packed(runs: Mapping[int, Sequence[Run]], slots: int, depth: int) -> mx.array:
    """Runs of rows for `force`, ``[S, MOST_RUNS, 3 + depth]`` int32: those of late places first."""
    array = np.zeros((slots, MOST_RUNS, 3 + depth), np.int32)
    for slot, found in runs.items():
        for index, run in enumerate(found[: -MOST_RUNS - 1 : -1]):
            tokens = run.forced[:depth]
            array[slot, index, : 3 + len(tokens)] = [run.place, run.token, len(tokens), *tokens]
    return mx.array(array)


def force(state: State, runs: mx.array, limits: mx.array, depth: int, vocabulary: int) -> State:
    """See `Masks.force`.

    Args:
        runs: from `packed`.
        vocabulary: 0 if the drafts' distributions are not asked for.
    """
    names = ("accepted", "pending", "drafted", "drafts", "weights", "looked_up")
    used = {name: state[name] for name in names if name in state}
    return state | _forcing(depth, vocabulary)(used, runs, limits)


def _fill(bits: NDArray[np.int32], rows: Sequence[tuple[LLMatcher, list[int]]]) -> None:
    """Fill masks ``[1 + N, W, words]``: the first stays, the others are those of ``rows``."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    flat, width = bits.reshape(-1, bits.shape[-1]), bits.shape[1]
    numbered = [(inner, index * width, drafts) for index, (inner, drafts) in enumerate(rows, 1)]
    # llguidance refuses an empty list of drafts.
    if alone := [(inner, index) for inner, index, drafts in numbered if not drafts]:
        fill_next_token_bitmask_par(_executor(), alone, flat)
    if ahead := [row for row in numbered if row[2]]:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), ahead, flat)


def _few(words: NDArray[np.uint32]) -> list[int]:
    """The tokens of a mask; none if there are more than `FEW`."""
    used = np.flatnonzero(words)
    if len(used) > FEW:
        return []
    tokens = [
        int(word) * BITS + bit for word in used for bit in range(BITS) if words[word] >> bit & 1
    ]
    return tokens if len(tokens) <= FEW else []


@cache
def _executor() -> LLExecutor:
    """The threads that fill masks."""
    from llguidance import LLExecutor

    return LLExecutor()


@cache
def _forcing(depth: int, vocabulary: int) -> Callable[[State, mx.array, mx.array], State]:
    function: Callable[[State, mx.array, mx.array], State] = mx.compile(
        partial(_force, depth=depth, vocabulary=vocabulary)
    )
    return function


def _force(state: State, runs: mx.array, limits: mx.array, *, depth: int, vocabulary: int) -> State:
    place, token, count = (runs[..., index] for index in range(3))
    hit = (place == state["accepted"][:, None]) & (token == state["pending"][:, None]) & (count > 0)
    found = mx.argmax(hit, axis=1)[:, None, None]
    run = mx.take_along_axis(runs, found, axis=1)[:, 0]
    count, tokens = mx.where(hit.any(axis=1), mx.minimum(run[:, 2], limits), 0), run[:, 3:]
    inside = mx.arange(depth) < count[:, None]
    # Drafts that begin with the forced tokens may go on past them, so they stay.
    known = ((state["drafts"] == tokens) | ~inside).all(axis=1) & (state["drafted"] >= count)
    chosen = (count > 0) & ~known
    after = merged(tokens, chosen, state, depth, vocabulary)
    after["drafted"] = mx.where(chosen, count, state["drafted"])
    if "looked_up" in state:
        after["looked_up"] = mx.where(chosen, 0, state["looked_up"])
    return after
