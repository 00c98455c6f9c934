"""Drafts are what followed the longest suffix of a row's history where it occurred before."""

from __future__ import annotations

import random

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.engine.drafts.lookup import (
    BEFORE_OWN,
    GAP,
    LEAD,
    LONGEST,
    PIECE,
    SHORTEST,
    START,
    Ring,
    search,
)

DEPTH = 4


def found(
    histories: list[list[int]],
    ring: list[int] | None = None,
    depth: int = DEPTH,
    shortest: int = SHORTEST,
) -> list[list[int]]:
    """The drafts of each row."""
    padded = [[START] * LEAD + history + [7] * (PIECE + 1 - len(history)) for history in histories]
    cursors = mx.array([len(history) - 1 for history in histories], mx.int32)
    known = None if ring is None else mx.array(ring, mx.int32)
    tokens, counts = search(mx.array(padded, mx.int32), cursors, known, depth, shortest)
    pairs = zip(tokens.tolist(), counts.tolist(), strict=True)
    return [drafts[:count] for drafts, count in pairs]


def longest(text: list[int], history: list[int], last: int, shortest: int) -> tuple[int, int]:
    """The same search in plain Python: length and end of the best match that ends by ``last``."""
    best = (0, 0)
    for end in range(last):
        length = 0
        most = min(LONGEST, len(history), end + 1)
        while length < most and text[end - length] == history[-1 - length]:
            length += 1
        if length >= shortest and text[end + 1] != GAP:
            best = max(best, (length, end))
    return best


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)
LENGTHS = st.sampled_from([SHORTEST, BEFORE_OWN])


@given(st.lists(TEXTS, min_size=1, max_size=3), st.lists(TEXTS, max_size=3), LENGTHS)
def test_the_latest_of_the_longest_matches_is_found(
    histories: list[list[int]], others: list[list[int]], shortest: int
) -> None:
    text = [token for other in others for token in (*other, GAP)]
    ring = [GAP] * LEAD + text + [GAP] * (PIECE - LEAD - len(text))

    for history, drafts in zip(histories, found(histories, ring, shortest=shortest), strict=True):
        own, theirs = (
            longest(history, history, len(history) - 1, shortest),
            longest(ring, history, len(ring) - 1, shortest),
        )
        if theirs[0] > own[0]:
            after = ring[theirs[1] + 1 :]
            assert drafts == [*after, GAP][: [*after, GAP].index(GAP)][:DEPTH]
        elif own[0]:
            after = history[own[1] + 1 :]
            assert drafts == [after[place % len(after)] for place in range(DEPTH)]
        else:
            assert drafts == []


def test_two_tokens_in_common_are_no_match() -> None:
    assert found([[1, 2, 3, 4, 8, 2, 3]]) == [[]]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    [drafts] = found([[*[1, 2, 3] * 4]], depth=7)

    assert drafts == [1, 2, 3, 1, 2, 3, 1]


def test_a_ring_forgets_the_oldest_texts_and_grows_to_its_limit() -> None:
    rng = random.Random(1)
    ring = Ring(10_000)
    texts = [[rng.randrange(1000) for _ in range(900)] for _ in range(15)]
    assert ring.tokens.shape[0] < 9_000
    for text in texts:
        ring.add(mx.array(text, mx.int32))
    assert ring.tokens.shape[0] == 10_000 // PIECE * PIECE

    held = [found([text[500:510]], ring.tokens.tolist()) for text in texts]

    assert held[-1] == [texts[-1][510:514]]
    assert held[0] == [[]]
    assert sum(len(drafts) > 0 for [drafts] in held) in (10, 11)


def test_no_match_goes_from_a_text_into_what_is_left_of_an_older_one() -> None:
    ring = Ring(PIECE)
    ring.add(mx.arange(200, dtype=mx.int32))
    ring.add(mx.arange(300, 400, dtype=mx.int32))

    known = ring.tokens.tolist()

    assert found([list(range(390, 400))], known) == [[]]
    assert found([[397, 398, 399, 102, 103]], known) == [[]]
    assert found([[398, 399, 101, 102, 103]], known) == [[104, 105, 106, 107]]


def test_a_text_longer_than_the_ring_is_cut() -> None:
    ring = Ring(256)
    ring.add(mx.arange(400, dtype=mx.int32))

    assert found([list(range(20, 30))], ring.tokens.tolist()) == [[30, 31, 32, 33]]
