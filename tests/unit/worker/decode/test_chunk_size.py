"""How long running rows wait for somebody else's prompt."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import (
    FEWEST_TOKENS,
    FIRST_UNHURRIED_TOKENS,
    GAP,
    WORTH,
    ChunkSize,
)
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row, Stage
from tests.helpers.scheduling import follow

Cost = Callable[[int, int], float]

# Seconds of a chunk by its tokens and the context before it: on a device where a step takes 20 ms.
DEVICES: dict[str, Cost] = {
    "a laptop's GPU": lambda tokens, context: 0.008 + tokens * (0.0008 + 2e-8 * context),
    "a server's GPU": lambda tokens, context: 0.012 + tokens * (1.5e-5 + 1e-9 * context),
    "a CPU": lambda tokens, context: 0.001 + tokens * (0.0008 + 1e-8 * context),
}


def row(name: str, tokens: int) -> Row:
    return Row(RowRequest(name, [0] * (tokens + 1), 100, Sampling()))


@pytest.mark.parametrize("device", DEVICES)
def test_a_32k_prompt_holds_running_rows_up_as_briefly_as_is_worth_a_chunk(device: str) -> None:
    chunks, chance = ChunkSize(2048), random.Random(3)
    scheduler = Scheduler(8, chunks, MemoryBudget(0, 0, lambda _: 0))
    gaps: list[float] = []
    now = token_at = 0.0
    for number in range(4):
        scheduler.add(row(f"short-{number}", 40))
    long = row("long", 32_768)
    arrived, first = False, 0.0
    while long.stage is not Stage.DECODING:
        act, seconds = scheduler.next(), 0.0
        if act.chunk:
            seconds = DEVICES[device](act.chunk.computed, act.chunk.context)
            # What is left of the step in flight is waited for too.
            seconds += 0.010 if scheduler.decoding else 0.0
            now += seconds
        elif act.rows and not act.row:
            seconds = 0.020 * chance.uniform(0.95, 1.1)
            now += seconds
            chunks.stepped(now - token_at)
            if arrived and now > first:
                gaps.append(now - token_at)
            token_at = now
        follow(scheduler, act, seconds)
        if not arrived and now > 1:
            arrived, first = True, now
            scheduler.add(long)
    assert len(gaps) > 20
    fixed = DEVICES[device](0, 0) + 0.010
    promised = max((GAP - 1) * 0.020, WORTH * fixed)
    assert statistics.median(gaps) < 1.1 * 0.020 + 1.3 * promised
    assert max(gaps) < 1.1 * 0.020 + 2 * promised


def between_two_steps(chunks: ChunkSize, gap: Callable[[int], float]) -> int:
    """Read a chunk between two steps that are `gap(tokens)` seconds apart; returns its tokens."""
    tokens = chunks.chunk(0, True, left=10**6)
    chunks.read(0, True, tokens, 0.0)
    chunks.stepped(gap(tokens))
    return tokens


def test_short_prompts_that_come_at_once_are_read_together_where_tokens_cost_little() -> None:
    chunks, chance = ChunkSize(2048), random.Random(1)
    scheduler = Scheduler(64, chunks, MemoryBudget(0, 0, lambda _: 0))
    reads = 0
    for burst in range(6):
        scheduler.add(row(f"{burst}-first", 16))
        late = [row(f"{burst}-{place}", chance.randint(14, 19)) for place in range(31)]
        gap, steps = 0.0, 0
        while scheduler.rows:
            act = scheduler.next()
            if act.row:
                follow(scheduler, act)
            elif act.chunk:
                seconds = DEVICES["a server's GPU"](act.chunk.computed, 0)
                gap += seconds
                reads += burst > 0
                follow(scheduler, act, seconds)
                while late:
                    scheduler.add(late.pop())
            else:
                chunks.stepped(gap + 0.020 * chance.uniform(0.95, 1.1))
                gap, steps = 0.0, steps + 1
                if not scheduler.waiting and steps > 60:
                    for done in scheduler.rows:
                        scheduler.remove(done)
    assert reads < 5 * 32 / 3


def test_chunks_are_known_where_load_leaves_no_step_without_one_before_it() -> None:
    chunks = ChunkSize(2048)
    for _ in range(60):
        tokens = chunks.chunk(0, True, left=10**6)
        chunks.read(0, True, tokens, 0.030 + 1e-4 * tokens)
        chunks.stepped(0.035 + 1e-4 * tokens)
    assert 0.8 * WORTH * 0.030 < 0.030 + 1e-4 * tokens < 1.2 * WORTH * 0.030


def test_what_is_fixed_is_not_forgotten_where_all_chunks_have_one_size() -> None:
    chunks = ChunkSize(2048)
    for left in (32, 16, *[16] * 64):
        chunks.stepped(0.005)
        chunks.read(0, True, chunks.chunk(0, True, left), 0.0)
        chunks.stepped(0.035 + 1e-4 * left)
    assert chunks.whole(0, True) >= 32


@pytest.mark.parametrize("fixed", [0.03, 0.3])
def test_where_a_chunk_costs_much_however_few_its_tokens_it_holds_many(fixed: float) -> None:
    chunks = ChunkSize(2048)
    for _ in range(60):
        chunks.stepped(0.005)
        tokens = between_two_steps(chunks, lambda tokens: 0.005 + fixed + 1e-4 * tokens)
    assert fixed + 1e-4 * tokens > 1.4 * fixed or tokens == 2048


def test_prompts_of_few_tokens_are_read_together_where_a_chunk_costs_many_steps() -> None:
    chunks, prompt, rows = ChunkSize(2048), 20, 0
    for _ in range(8):
        chunks.stepped(0.007)
        rows = max(1, chunks.whole(0, True) // prompt)
        chunks.read(0, True, rows * prompt, 0.0)
        chunks.stepped(0.032 + 3e-5 * rows * prompt)
    assert rows >= 32


def test_a_prompt_that_fills_no_chunk_does_not_shrink_the_next_one() -> None:
    chunks = ChunkSize(2048)
    for place in range(60):
        chunks.stepped(0.005)
        tokens = 20 if place % 2 else chunks.chunk(0, True, left=10**6)
        chunks.read(0, True, tokens, 0.0)
        chunks.stepped(0.035 + 1e-5 * tokens)
    assert chunks.whole(0, True) > 1000


def test_a_larger_chunk_that_was_slow_once_is_tried_again() -> None:
    chunks = ChunkSize(2048)
    for place in range(120):
        tokens = min(224, chunks.chunk(0, False, left=10**6))
        chunks.read(0, False, tokens, 0.03 + 1e-5 * tokens if place else 5.0)
    assert tokens == 224


def test_a_row_is_padded_as_far_as_a_step_and_a_chunk_of_its_own_would_cost() -> None:
    chunks = ChunkSize(2048)
    chunks.stepped(0.02)
    for tokens in (16, 64, 256):
        chunks.read(0, False, tokens, 0.03 + 1e-4 * tokens)
    assert 490 < chunks.padding(0, False) < 510


def test_chunks_shrink_as_the_context_grows() -> None:
    chunks = ChunkSize(4096)
    sizes = []
    context = 0
    for _ in range(400):
        tokens = chunks.chunk(context, False, left=10**6)
        chunks.read(context, False, tokens, tokens * (0.0002 + 4e-8 * context))
        context += tokens
        sizes.append(tokens)
    assert sizes[0] == FIRST_UNHURRIED_TOKENS, "nothing was measured yet"
    assert max(sizes) > 2 * sizes[-1]
    assert sizes[-1] < 1000
    worst = max(
        size * (0.0002 + 4e-8 * sum(sizes[:place])) for place, size in enumerate(sizes[3:], start=3)
    )
    assert worst < 2, "Metal would have killed it at five"


def test_nothing_slows_a_prompt_while_only_bulk_rows_run() -> None:
    chunks = ChunkSize(2048)
    for _ in range(40):
        chunks.stepped(0.02)
        size = chunks.chunk(0, False, left=10**6)
        chunks.read(0, False, size, size * 1e-4)
        chunks.stepped(0.02 + size * 1e-4)
    assert chunks.chunk(0, False, left=10**6) == 2048
    for _ in range(40):
        between_two_steps(chunks, lambda tokens: 0.02 + tokens * 1e-4)
    fitting = (GAP - 1) * 0.02 / 1e-4
    assert 0.8 * fitting < chunks.chunk(0, True, left=10**6) <= 1.1 * fitting


def test_a_chunk_never_becomes_so_small_that_reading_stands_still() -> None:
    chunks = ChunkSize(2048)
    chunks.stepped(0.001)
    for _ in range(50):
        between_two_steps(chunks, lambda tokens: 10.0 * tokens)
    assert chunks.chunk(0, True, left=10**6) == FEWEST_TOKENS


def test_the_short_last_piece_of_a_prompt_says_nothing() -> None:
    chunks = ChunkSize(2048)
    chunks.stepped(0.02)
    before = chunks.chunk(0, True, left=10**6)
    chunks.read(0, True, 3, 0.001)
    chunks.stepped(0.021)
    assert chunks.chunk(0, True, left=10**6) == before


def test_prompts_that_are_shorter_than_a_chunk_let_it_grow_if_they_nearly_fill_it() -> None:
    chunks = ChunkSize(2048)
    chunks.read(0, False, FIRST_UNHURRIED_TOKENS // 4, 0.02)
    assert chunks.whole(0, False) == FIRST_UNHURRIED_TOKENS
    chunks.read(0, False, FIRST_UNHURRIED_TOKENS - 50, 0.05)
    assert chunks.whole(0, False) == 2 * (FIRST_UNHURRIED_TOKENS - 50)


def test_steps_of_another_depth_are_not_taken_for_a_chunks_time() -> None:
    chunks, steps, each = ChunkSize(2048), {0: 0.02, 3: 0.09}, 8e-4
    for depth in (0, 3, 0, 3, 0):
        for _ in range(30):
            chunks.stepped(steps[depth], depth)
            tokens = chunks.chunk(0, True, left=10**6)
            chunks.read(0, True, tokens, 0.0)
            chunks.stepped(steps[depth] + 0.001 + each * tokens, depth)
        fitting = (GAP - 1) * steps[depth] / each
        assert 0.8 * fitting < tokens < 1.1 * fitting


def test_rows_that_are_used_to_long_steps_wait_as_long_for_a_chunk_beside_a_short_one() -> None:
    chunks, each = ChunkSize(2048), 8e-4
    for _ in range(30):
        for _ in range(8):
            chunks.stepped(0.05, depth=2)
        tokens = chunks.chunk(0, True, left=10**6)
        chunks.read(0, True, tokens, 0.0)
        chunks.stepped(0.05 + each * tokens, depth=2)
        for _ in range(2):
            chunks.stepped(0.02, depth=0)
        tokens = chunks.chunk(0, True, left=10**6)
        chunks.read(0, True, tokens, 0.0)
        chunks.stepped(0.02 + each * tokens, depth=0)
    assert 0.8 < each * tokens / ((GAP - 1) * 0.05) < 1.1


def test_rows_soon_get_used_to_shorter_steps() -> None:
    chunks, each = ChunkSize(2048), 8e-4
    for seconds, depth in ((0.06, 3), (0.02, 0)):
        for _ in range(30):
            chunks.stepped(seconds, depth)
            tokens = chunks.chunk(0, True, left=10**6)
            chunks.read(0, True, tokens, 0.0)
            chunks.stepped(seconds + each * tokens, depth)
    assert each * tokens < 1.1 * (GAP - 1) * 0.02


def test_a_wait_with_more_in_it_than_a_chunk_says_nothing() -> None:
    chunks = ChunkSize(2048)
    chunks.stepped(0.02)
    before = chunks.chunk(0, True, left=10**6)
    chunks.read(0, True, before, 0.0)
    chunks.stepped(None)
    for _ in range(2):
        chunks.read(0, True, before, 0.0)
    chunks.stepped(5.0)
    assert chunks.chunk(0, True, left=10**6) == before


def test_a_short_rest_of_a_prompt_is_read_with_the_last_chunk() -> None:
    chunks = ChunkSize(2048)
    size = chunks.chunk(0, False, left=10**6)
    assert chunks.chunk(0, False, left=size + 20) == size + 20
    assert chunks.chunk(0, False, left=2 * size) == size
    assert chunks.chunk(0, False, left=3) == 3


def test_one_slow_chunk_keeps_chunks_short_only_for_a_while() -> None:
    chunks, step, each = ChunkSize(2048), 0.02, 2e-5
    for _ in range(20):
        chunks.stepped(step)
        usual = between_two_steps(chunks, lambda tokens: step + each * tokens)
    between_two_steps(chunks, lambda _: 5.0)
    assert chunks.chunk(0, True, left=10**6) >= usual // 2
    chunks.stepped(step)
    between_two_steps(chunks, lambda tokens: step + each * tokens)
    assert chunks.chunk(0, True, left=10**6) > 0.9 * usual


def test_no_chunk_is_larger_than_the_user_allows() -> None:
    chunks = ChunkSize(10)
    assert chunks.chunk(0, False, left=12) == 10


@pytest.mark.parametrize("seed", range(4))
def test_times_that_are_all_but_zero_make_no_chunk_longer_than_its_prompt(seed: int) -> None:
    chance = random.Random(seed)
    chunks, scale = ChunkSize(chance.choice([4, 8, 64, 512, 2048])), 10 ** chance.uniform(-7, 0)
    for _ in range(300):
        if chance.random() < 0.5:
            seconds = [None, 0.0, chance.random() * scale, chance.random() * scale * 100]
            chunks.stepped(chance.choice(seconds), chance.choice([0, 0, 1]))
            continue
        left, context, hurried = chance.choice([1, 5, 20, 100, 3000]), 0, chance.random() < 0.5
        while left and chance.random() < 0.95:
            tokens = chunks.chunk(context, hurried, left)
            assert 0 < tokens <= left
            taken = [0.0, chance.random() * scale, chance.random() * scale * tokens]
            chunks.read(context, hurried, tokens, chance.choice(taken))
            context, left = context + tokens, left - tokens
            if chance.random() < 0.7:
                chunks.stepped(chance.choice([0.0, chance.random() * scale]))


@pytest.mark.parametrize("seed", range(6))
def test_a_few_slow_steps_let_no_chunk_hold_rows_up_for_long(seed: int) -> None:
    chunks, chance, step = ChunkSize(2048), random.Random(seed), 0.02
    longest = 0.0
    for _ in range(150):
        context, left = 0, int(10 * 2 ** chance.uniform(0, 9))
        for _ in range(5):
            chunks.stepped(step)
        while left:
            tokens = chunks.chunk(context, True, left)
            seconds = DEVICES["a laptop's GPU"](tokens, context)
            longest = max(longest, seconds)
            chunks.read(context, True, tokens, 0.0)
            slow = 0.4 if chance.random() < 0.03 else 0.0
            chunks.stepped(step + seconds * chance.choice((0.9, 1.0, 1.0, 1.1, 2.0)) + slow)
            context, left = context + tokens, left - tokens
    assert longest < 14 * step


def test_chunks_of_a_unit_end_at_its_multiples_or_with_the_prompt() -> None:
    chunks = ChunkSize(2048, 256)
    chunks.read(0, False, 256, 1e-6)

    assert chunks.chunk(0, True, 1000) == 256
    assert chunks.chunk(256, False, 44) == 44
    assert chunks.chunk(300, False, 1000) == 212
    assert chunks.whole(0, True) == 256
