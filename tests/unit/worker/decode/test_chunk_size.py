"""How many tokens of a prompt are read at a time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from omlx_worker.decode.chunk_size import (
    FEWEST_TOKENS,
    FIRST_TOKENS,
    MOST_SECONDS,
    WORTH,
    ChunkSize,
)


def read(
    chunks: ChunkSize, seconds: Callable[[int], float], *, hurried: bool = True, count: int = 60
) -> int:
    """Read chunks of a long prompt, each in `seconds(tokens)`; returns the last one's tokens."""
    for _ in range(count):
        tokens = chunks.chunk(0, hurried, left=10**6)
        chunks.read(0, tokens, seconds(tokens))
    return tokens


@pytest.mark.parametrize("fixed", [0.04, 0.1, 0.3])
def test_rows_wait_for_a_chunk_some_times_as_long_as_for_an_empty_one(fixed: float) -> None:
    tokens = read(ChunkSize(2048), lambda tokens: fixed + 1e-3 * tokens)
    assert fixed + 1e-3 * tokens == pytest.approx(WORTH * fixed, rel=0.05)


def test_a_chunk_takes_a_second_while_nobody_waits_for_tokens() -> None:
    tokens = read(ChunkSize(2048), lambda tokens: 0.02 + 1e-3 * tokens, hurried=False)
    assert 0.02 + 1e-3 * tokens == pytest.approx(MOST_SECONDS, rel=0.05)


def test_no_chunk_takes_longer_than_a_second_though_an_empty_one_nearly_does() -> None:
    tokens = read(ChunkSize(2048), lambda tokens: 0.8 + 1e-3 * tokens)
    assert 0.8 + 1e-3 * tokens == pytest.approx(MOST_SECONDS, rel=0.05)


def test_what_is_fixed_is_not_forgotten_where_all_chunks_have_one_size() -> None:
    chunks = ChunkSize(2048)
    for tokens in (128, 64, *[64] * 64):
        chunks.read(0, tokens, 0.035 + 1e-4 * tokens)
    assert chunks.whole(0, True) == 128


def test_prompts_of_few_tokens_are_read_together_where_a_chunk_costs_many_steps() -> None:
    chunks, prompt, rows = ChunkSize(2048), 20, 1
    for _ in range(8):
        rows = max(1, chunks.whole(0, True) // prompt)
        chunks.read(0, rows * prompt, 0.032 + 3e-5 * rows * prompt)
    assert rows >= 32


def test_a_prompt_that_fills_no_chunk_does_not_shrink_the_next_one() -> None:
    chunks = ChunkSize(2048)
    for place in range(60):
        tokens = 20 if place % 2 else chunks.chunk(0, True, left=10**6)
        chunks.read(0, tokens, 0.035 + 1e-5 * tokens)
    assert chunks.whole(0, True) > 1000


def test_a_larger_chunk_that_was_slow_once_is_tried_again() -> None:
    chunks = ChunkSize(2048)
    for place in range(120):
        tokens = min(224, chunks.chunk(0, False, left=10**6))
        chunks.read(0, tokens, 0.03 + 1e-5 * tokens if place else 5.0)
    assert tokens == 224


def test_chunks_shrink_as_the_context_grows() -> None:
    chunks, sizes, context = ChunkSize(4096), [], 0
    for _ in range(400):
        tokens = chunks.chunk(context, False, left=10**6)
        seconds = tokens * (0.0002 + 4e-8 * context)
        assert seconds < 2.5, "Metal would have killed it at five"
        chunks.read(context, tokens, seconds)
        context += tokens
        sizes.append(tokens)
    assert max(sizes) > 2 * sizes[-1]


def test_a_chunk_never_becomes_so_small_that_reading_stands_still() -> None:
    assert read(ChunkSize(2048), lambda tokens: 10.0 * tokens) == FEWEST_TOKENS


def test_one_slow_chunk_keeps_chunks_short_only_for_a_while() -> None:
    chunks = ChunkSize(2048)
    usual = read(chunks, lambda tokens: 0.02 + 1e-4 * tokens)
    read(chunks, lambda _: 5.0, count=1)
    assert chunks.whole(0, True) >= usual // 2
    assert read(chunks, lambda tokens: 0.02 + 1e-4 * tokens) > 0.9 * usual


def test_no_chunk_is_larger_than_the_user_allows_or_than_what_is_left() -> None:
    chunks = ChunkSize(10)
    assert chunks.chunk(0, False, left=12) == 10
    assert chunks.chunk(0, False, left=3) == 3
    assert ChunkSize(2048).chunk(0, True, left=10**6) == FIRST_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_times_that_are_all_but_zero_make_no_chunk_longer_than_its_prompt(seed: int) -> None:
    chance = random.Random(seed)
    chunks, scale = ChunkSize(chance.choice([4, 8, 64, 512, 2048])), 10 ** chance.uniform(-7, 0)
    for _ in range(300):
        left, context, hurried = chance.choice([1, 5, 20, 100, 3000]), 0, chance.random() < 0.5
        while left and chance.random() < 0.95:
            tokens = chunks.chunk(context, hurried, left)
            assert 0 < tokens <= left
            taken = [0.0, chance.random() * scale, chance.random() * scale * tokens]
            chunks.read(context, tokens, chance.choice(taken))
            context, left = context + tokens, left - tokens


def test_few_chunks_hold_rows_up_for_long_though_some_are_slow() -> None:
    fixed, waits = 0.028, list[float]()
    for seed in range(20):
        chunks, chance = ChunkSize(2048), random.Random(seed)
        for number in range(150):
            context, left = 0, int(10 * 2 ** chance.uniform(0, 9))
            while left:
                tokens = chunks.chunk(context, True, left)
                seconds = fixed + tokens * (0.0008 + 2e-8 * context)
                waits += [seconds / fixed] if number >= 5 else []
                slow = 0.4 if chance.random() < 0.03 else 0.0
                noise = chance.choice((0.9, 1.0, 1.0, 1.1, 2.0))
                chunks.read(context, tokens, seconds * noise + slow)
                context, left = context + tokens, left - tokens
    assert sum(wait > 5 for wait in waits) < len(waits) / 10


def test_chunks_of_a_unit_end_at_its_multiples_or_with_the_prompt() -> None:
    chunks = ChunkSize(2048, 256)
    chunks.read(0, 256, 1e-6)

    assert chunks.chunk(0, True, 1000) == 256
    assert chunks.chunk(256, False, 44) == 44
    assert chunks.chunk(300, False, 1000) == 212
    assert chunks.whole(0, True) == 256
