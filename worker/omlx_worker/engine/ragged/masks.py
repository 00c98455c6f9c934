"""Constrained rows beside the step: what each may sample at each place of its window.

A matcher follows a row's committed tokens through its grammar. For the places after the first of a
window it looks ahead along the row's drafts, which are read back from the device. A draft that the
grammar forbids is never accepted, so places after it need no mask.

Where a grammar allows one way to go on, its tokens are forced. A row that has accepted all drafts
up to there samples the first of them for certain, so the others are its next drafts, in place of
the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from omlx_worker.engine.constraints import Grammar
from omlx_worker.engine.ragged.lookups import merged
from omlx_worker.engine.ragged.step import State

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

BITS = 32
"""Tokens to a word of a mask."""


class Matcher:
    """One row's way through its grammar.

    Args:
        generated: the tokens that the row starts with.

    Attributes:
        inner: llguidance's own.
        vocabulary: tokens that its masks tell of.
        failed: whether the row cannot go on: its text left the grammar, or the grammar took more
            than a step may take. The row ends as if cut by its token limit.
    """

    def __init__(self, grammar: Grammar, generated: Sequence[int] = ()) -> None:
        self.inner = grammar.start.deep_copy()
        self.vocabulary = grammar.vocabulary
        self.failed = False
        self.commit(generated)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens that the row has committed. Those after an end token are ignored."""
        taken = self.inner.try_consume_tokens(list(tokens))
        self.failed |= self.inner.is_error()
        self.failed |= taken < len(tokens) and not self.inner.is_stopped()

    def forced(self, drafts: Sequence[int]) -> tuple[int, list[int]]:
        """How many of these drafts the grammar allows, and the tokens that are forced after them.

        The first forced token is not returned: it is sampled, not drafted.
        """
        allowed = self.inner.validate_tokens(list(drafts))
        self.inner.consume_tokens(list(drafts[:allowed]))
        tokens = self.inner.compute_ff_tokens()
        self.inner.rollback(allowed)
        return allowed, tokens[1:]


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
            ``[S, W, ceil(V / 32)]`` uint32; a set bit allows a token, the lowest bit first.
        """
        windows = self.look_ahead(state, depth)
        slots, width = len(state["drafted"]), 1
        if "drafts" in state:
            width += state["drafts"].shape[1]
        words = max(-(-matcher.vocabulary // BITS) for _, matcher in self._rows)
        # The masks of rows that are free, then of each constrained row.
        bits = np.full((1 + len(windows), width, words), -1, np.int32)
        chosen = np.zeros(slots, np.int32)
        alone: list[tuple[LLMatcher, int]] = []
        ahead: list[tuple[LLMatcher, int, list[int]]] = []
        for index, (slot, matcher, drafts) in enumerate(windows, start=1):
            chosen[slot] = index
            if drafts:
                ahead.append((matcher.inner, index * width, drafts))
            else:
                alone.append((matcher.inner, index * width))
        _fill(bits.reshape(-1, words), alone, ahead)
        for _, matcher, _ in windows:
            matcher.failed |= matcher.inner.is_error()
        return mx.array(bits.view(np.uint32))[mx.array(chosen)]

    def look_ahead(self, state: State, depth: int) -> list[tuple[int, Matcher, list[int]]]:
        """The rows' slots, matchers and drafts; finds what is forced after the drafts."""
        drafts = np.array(state["drafts"]) if "drafts" in state else np.zeros((0, 0), np.int32)
        offered = np.array(state["drafted"])
        forced = np.zeros((len(offered), 2 + depth), np.int32)
        windows = []
        for slot, matcher in self._rows:
            if matcher.failed:
                continue
            given: list[int] = drafts[slot, : offered[slot]].tolist() if offered[slot] else []
            windows.append((slot, matcher, given))
            if depth:
                place, tokens = matcher.forced(given)
                tokens = tokens[:depth]
                forced[slot, : 2 + len(tokens)] = [place, len(tokens), *tokens]
        self._forced = mx.array(forced)
        return windows

    def force(self, state: State, limits: mx.array, depth: int, *, ratio: bool) -> State:
        """The state after the step, its drafts forced where they are known and differ.

        Args:
            limits: ``[S]`` int32, drafts of each row, at most.
            depth: drafts that the next step may judge.
            ratio: whether a row's drafts are judged by the `ratio` rule.
        """
        if not depth:
            return state
        function = _forcing(depth, self._vocabulary if ratio else 0)
        names = ("accepted", "drafted", "drafts", "weights", "looked_up")
        used = {name: state[name] for name in names if name in state}
        return state | function(used, self._forced, limits)


def _fill(
    bits: NDArray[np.int32],
    alone: list[tuple[LLMatcher, int]],
    ahead: list[tuple[LLMatcher, int, list[int]]],
) -> None:
    """Fill the masks of matchers, ``[N, V / 32]``, each from its own index on."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    if alone:
        fill_next_token_bitmask_par(_executor(), alone, bits)
    if ahead:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), ahead, bits)


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


def _force(
    state: State, forced: mx.array, limits: mx.array, *, depth: int, vocabulary: int
) -> State:
    place, count, tokens = forced[:, 0], forced[:, 1], forced[:, 2:]
    count = mx.where(state["accepted"] == place, mx.minimum(count, limits), 0)
    inside = mx.arange(depth) < count[:, None]
    # Drafts that begin with the forced tokens may go on past them, so they stay.
    known = ((state["drafts"] == tokens) | ~inside).all(axis=1) & (state["drafted"] >= count)
    chosen = (count > 0) & ~known
    after = merged(tokens, chosen, state, depth, vocabulary)
    after["drafted"] = mx.where(chosen, count, state["drafted"])
    if "looked_up" in state:
        after["looked_up"] = mx.where(chosen, 0, state["looked_up"])
    return after
