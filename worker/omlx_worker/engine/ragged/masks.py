"""Constrained rows beside the step: what each may sample at each place of its window.

A matcher follows a row's committed tokens through its grammar. For the places after the first of a
window it looks ahead along the row's drafts, which are read back from the device. A draft that the
grammar forbids is never accepted, so places after it need no mask. A budget of thinking does the
same: at the budget the mask is one token.

An ambiguous grammar can take seconds for one token. llguidance's own limits do not end that: they
count items of its parser, and 20,000 items can take 4 seconds (seen with 1.9.1). So rows are
followed in threads of their own, on a budget of time: a row that exceeds it ends, and with it every
row of its grammar.

Where a grammar leaves one way to go on, its tokens are forced: they are certain to be accepted. So
for tokens that a row may sample next, the forced ones after them go to the device. There those
after the token that was sampled become the row's next drafts, in place of the model's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from omlx_worker.engine.ragged.lookups import merged
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.ragged.timed_threads import TimedThreads
from omlx_worker.engine.rows.constraints import Grammar
from omlx_worker.engine.rows.row import SOURCES
from omlx_worker.engine.rows.thinking import Thoughts

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

BITS = 32
"""Tokens in one word of a mask."""

TOKEN_SECONDS, SPARE_SECONDS = 0.005, 0.1
"""CPU time that a row may take to follow its grammar: on average for each token committed and each
mask filled, and the most that it may be behind."""

COMMITTED_AT_ONCE = 16

FEW = 16
"""Tokens of the largest mask for which it is worth finding out what each token would force."""

MOST_RUNS = 16
"""Forced runs of a row and step that go to the device."""

_SOURCE = SOURCES.index("grammar")


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
        vocabulary: tokens that its masks cover.
        failed: whether its text has left the grammar, so that the row cannot go on. It ends as if
            cut by its token limit.
    """

    def __init__(self, grammar: Grammar, generated: Sequence[int] = ()) -> None:
        self.vocabulary = grammar.vocabulary
        self.failed = False
        self._grammar = grammar
        self._inner = grammar.start.deep_copy()
        self._debt = 0.0
        self.commit(generated)

    @property
    def too_slow(self) -> bool:
        """Whether its grammar has exceeded the budget of time, in this row or another."""
        return self._grammar.too_slow

    @property
    def ended(self) -> bool:
        """Whether the row cannot go on."""
        return self.failed or self.too_slow

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens that the row has committed. Those after an end token are ignored."""
        for start in range(0, len(tokens), COMMITTED_AT_ONCE):
            if self.ended:
                return
            began = time.thread_time()
            some = list(tokens[start : start + COMMITTED_AT_ONCE])
            taken = self._inner.try_consume_tokens(some)
            self._spend(time.thread_time() - began, len(some))
            if taken < len(some):
                self.failed |= not self._inner.is_stopped()
                return

    def follow(self, drafts: Sequence[int], bits: NDArray[np.int32], *, forces: bool) -> list[Run]:
        """Fill the masks of a window.

        Args:
            drafts: of the window. Those after one that is forbidden or ends the text do not count.
            bits: ``[W, words]``, all bits set; filled up to the place after the last such draft.
            forces: whether to look for forced tokens.

        Returns:
            What is forced after tokens that the row may sample.
        """
        began = time.thread_time()
        ends = (at for at, draft in enumerate(drafts) if draft in self._grammar.ends)
        drafts = list(drafts[: next(ends, len(drafts))])
        _fill(self._inner, drafts, bits)
        seen = bits.view(np.uint32)
        forbidden = (
            at for at, draft in enumerate(drafts) if not seen[at, draft // BITS] >> draft % BITS & 1
        )
        drafts = drafts[: next(forbidden, len(drafts))]
        self._spend(time.thread_time() - began, 1 + len(drafts))
        return self.runs(drafts, seen) if forces and not self.ended else []

    def give_up(self) -> None:
        """Refuse the grammar from now on: it takes too long to follow."""
        self._grammar.too_slow = True

    def _spend(self, seconds: float, tokens: int) -> None:
        self._debt = max(0.0, self._debt + seconds - tokens * TOKEN_SECONDS)
        # The error is one of llguidance's own limits.
        if self._debt > SPARE_SECONDS or self._inner.is_error():
            self.give_up()

    def runs(self, drafts: Sequence[int], bits: NDArray[np.uint32]) -> list[Run]:
        """What is forced after tokens that the row may sample in its window.

        Args:
            drafts: allowed ones. Where the next of them is sampled, the window goes on.
            bits: the masks of the places before, between and after them, ``[W, words]``.
        """
        inner, found = self._inner.deep_copy(), list[Run]()
        for place in range(len(drafts) + 1):
            following = list(drafts[place : place + 1])
            for token in _few(bits[place]):
                # An end token would not be rolled back.
                if token in self._grammar.ends or token in following:
                    continue
                began = time.thread_time()
                inner.consume_token(token)
                if forced := inner.compute_ff_tokens():
                    found.append(Run(place, token, forced))
                inner.rollback(1)
                self._spend(time.thread_time() - began, 0)
                if self.ended:
                    return []
            inner.consume_tokens(following)
        return found


def hold(thoughts: Thoughts, drafts: Sequence[int], bits: NDArray[np.int32]) -> None:
    """Leave one token in a window's masks ``[W, words]`` wherever the budget of thinking forces it.

    Args:
        drafts: of the window.
    """
    ahead = copy(thoughts)
    for place, draft in enumerate([*drafts, None]):
        if (token := ahead.forced) is not None:
            bits[place] = 0
            bits.view(np.uint32)[place, token // BITS] = 1 << token % BITS
        if draft is not None:
            ahead.feed(draft)


def fill(
    matchers: Mapping[int, Matcher],
    thoughts: Mapping[int, Thoughts],
    vocabulary: int,
    state: State,
    depth: int,
) -> tuple[mx.array, mx.array]:
    """Read the rows' drafts, fill their masks, and find the tokens that are forced next.

    Args:
        matchers, thoughts: of the rows that are masked in this step, by their slots.
        vocabulary: entries of the model's logits.
        state: of the step that is under way; the last step's tokens are committed.
        depth: drafts that the next step may judge.

    Returns:
        Masks ``[S, W, V / 32 or more]`` uint32; a set bit allows a token, the lowest bit first. And
        what is forced, for `force`.
    """
    drafts = np.array(state["drafts"]) if "drafts" in state else np.zeros((0, 0), np.int32)
    offered = np.array(state["offered"])
    followed = {slot: each for slot, each in matchers.items() if not each.ended}
    slots = list(followed.keys() | thoughts.keys())
    judged = {slot: drafts[slot, : offered[slot]].tolist() for slot in slots if offered[slot]}
    vocabularies = (matcher.vocabulary for matcher in followed.values())
    words = -(-max([vocabulary, *vocabularies]) // BITS)
    # One mask for all free rows, then one for each of the others.
    bits = np.full((1 + len(slots), 1 + drafts.shape[1], words), -1, np.int32)
    masks = dict(zip(slots, bits[1:], strict=True))
    runs: dict[int, list[Run]] = {}

    def follow(slot: int, matcher: Matcher) -> None:
        runs[slot] = matcher.follow(judged.get(slot, []), masks[slot], forces=depth > 0)

    if followed:
        late = _threads().run([partial(follow, *row) for row in followed.items()])
        for matcher, is_late in zip(followed.values(), late, strict=True):
            if is_late:
                matcher.give_up()
    for slot, each in thoughts.items():
        hold(each, judged.get(slot, []), masks[slot])
    ended = {slot for slot, matcher in matchers.items() if matcher.ended}
    chosen = np.zeros(len(offered), np.int32)
    for index, slot in enumerate(slots, 1):
        chosen[slot] = 0 if slot in ended else index
    going = {slot: found for slot, found in list(runs.items()) if chosen[slot]}
    allowed = mx.array(bits.view(np.uint32))[mx.array(chosen)]
    return allowed, packed(going, len(offered), depth)


def packed(runs: Mapping[int, Sequence[Run]], slots: int, depth: int) -> mx.array:
    """Runs of rows for `force`, ``[S, MOST_RUNS, 3 + depth]`` int32: those of late places first."""
    array = np.zeros((slots, MOST_RUNS, 3 + depth), np.int32)
    for slot, found in runs.items():
        for index, run in enumerate(found[: -MOST_RUNS - 1 : -1]):
            tokens = run.forced[:depth]
            array[slot, index, : 3 + len(tokens)] = [run.place, run.token, len(tokens), *tokens]
    return mx.array(array)


def force(state: State, runs: mx.array, limits: mx.array, depth: int) -> State:
    """Replace drafts by forced tokens in the state after the step; returns the new state.

    Args:
        runs: from `packed`.
        limits: ``[S]`` int32, drafts of each row, at most.
        depth: drafts that the next step may judge.
    """
    names = ("accepted", "pending", "offered", "source", "drafts")
    return state | _force({name: state[name] for name in names}, runs, limits, depth)


def _fill(inner: LLMatcher, drafts: list[int], bits: NDArray[np.int32]) -> None:
    """Fill a row's masks ``[W, words]`` along its drafts."""
    from llguidance.numpy import (
        fill_next_token_bitmask,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    if drafts:
        # For one row it runs in this thread.
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), [(inner, 0, drafts)], bits)
    else:
        fill_next_token_bitmask(inner, bits)


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
    from llguidance import LLExecutor

    return LLExecutor(1)


@cache
def _threads() -> TimedThreads:
    """The threads that follow grammars."""
    return TimedThreads(max(1, (os.cpu_count() or 1) * 4 // 5))


@mx.compile
def _force(state: State, runs: mx.array, limits: mx.array, depth: int) -> State:
    place, token, count = (runs[..., index] for index in range(3))
    hit = (place == state["accepted"][:, None]) & (token == state["pending"][:, None]) & (count > 0)
    found = mx.argmax(hit, axis=1)[:, None, None]
    run = mx.take_along_axis(runs, found, axis=1)[:, 0]
    count, tokens = mx.where(hit.any(axis=1), mx.minimum(run[:, 2], limits), 0), run[:, 3:]
    inside = mx.arange(depth) < count[:, None]
    # Drafts that begin with the forced tokens may go on past them, so they stay.
    known = ((state["drafts"] == tokens) | ~inside).all(axis=1) & (state["offered"] >= count)
    chosen = (count > 0) & ~known
    return {
        "drafts": merged(tokens, chosen, state, depth),
        "offered": mx.where(chosen, count, state["offered"]),
        "source": mx.where(chosen, _SOURCE, state["source"]),
    }
