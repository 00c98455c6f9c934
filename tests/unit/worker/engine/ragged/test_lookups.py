"""Drafts are what followed a row's last tokens before; the text is the same, whoever drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.engine.caches.recurrent_cache import widened
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.lookups import (
    BEFORE_OWN,
    LEAD,
    LONGEST,
    PIECE,
    SHORTEST,
    Runs,
    history_of,
    search,
)
from omlx_worker.engine.ragged.sampling import Plan, params
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import SOURCES, RowStep, Source
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run
from tests.helpers.table_law import whole_step
from tests.helpers.table_model import TableModel

pytestmark = pytest.mark.usefixtures("small_buckets")

PROMPTS = {
    "loop": [5, 9, 13, 21, 34, 55, 89, 144] * 3,
    "short": [3],
    "words": [*range(40, 70), 7, 7, 7],
}
LOOP = "value = 1\n" * 8
SEEDED = Sampling(temperature=0.7, filters={"top_p": 0.95}, seed=11)
PENALISED = replace(SEEDED, repetition_penalty=1.2)
TOKENS = 48


class Counting(RaggedDecoder):
    """Counts who drafted, and how many were accepted."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.accepted: Counter[Source] = Counter()

    def step(self, depth: int | None = None) -> list[RowStep]:
        steps = super().step(depth)
        for outcome in steps:
            self.accepted[outcome.source] += outcome.accepted
        return steps


def rows(sampling: Sampling) -> list[RowRequest]:
    return [row(name, prompt, TOKENS, sampling) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize(
    ("sampling", "depths"),
    [
        (PENALISED, [(0, 8), (2, 3)]),
        *(
            pytest.param(sampling, [(0, 1), (0, 8), (2, 3), (3, 8)], marks=pytest.mark.slow)
            for sampling in (GREEDY, SEEDED, PENALISED)
        ),
    ],
)
def test_a_text_is_the_same_at_every_depth_and_in_company(
    qwen: Loaded, sampling: Sampling, depths: list[tuple[int, int]]
) -> None:
    alone = {r.row_id: run(qwen.decoder(), [r])[r.row_id] for r in rows(sampling)}

    for own, lookup in depths:
        decoder = qwen.decoder(own, lookup)
        assert run(decoder, rows(sampling), arrivals={"words": 4}) == alone, (own, lookup)


def test_a_text_that_repeats_itself_is_copied_in_few_steps(demo: Loaded) -> None:
    prompt = demo.tokenizer.encode(LOOP)
    decoder = Counting(demo.decoder()._model, 0, 8)

    assert run(decoder, [row("again", prompt, TOKENS)])["again"] == demo.greedy(prompt, TOKENS)
    assert decoder.accepted["lookup"] > TOKENS // 2
    assert decoder.reads < TOKENS // 2


@pytest.mark.parametrize(
    "salt",
    [
        "theirs",
        pytest.param("ours", marks=pytest.mark.slow),
        pytest.param(None, marks=pytest.mark.slow),
    ],
)
def test_no_row_looks_up_what_another_has_written(qwen: Loaded, salt: str | None) -> None:
    model = qwen.decoder()._model
    alone, beside = Counting(model, 0, 8), Counting(model, 0, 8)
    prompt = PROMPTS["words"]
    first = run(alone, [row("alone", prompt, TOKENS)])["alone"]
    run(beside, [replace(row("before", prompt, TOKENS), salt="theirs")])
    before = beside.accepted["lookup"]

    after = run(beside, [replace(row("after", prompt, TOKENS), salt=salt)])["after"]

    assert after == first
    assert beside.accepted["lookup"] - before == alone.accepted["lookup"]


@pytest.mark.slow
def test_a_row_may_have_any_limit_up_to_the_depth_of_lookups(demo: Loaded) -> None:
    prompt = demo.tokenizer.encode(LOOP)
    wanted = demo.greedy(prompt, TOKENS)
    for limit in (6, MAX_DRAFT_DEPTH):
        decoder = demo.decoder(0, 8)
        enter(decoder, replace(row("loop", prompt, TOKENS), depth=limit))
        tokens: list[int] = []
        drafted = 0
        while len(tokens) < TOKENS:
            for outcome in decoder.step():
                tokens += [sampled.token for sampled in outcome.tokens]
                drafted = max(drafted, outcome.drafted)
        assert tokens[:TOKENS] == wanted
        assert drafted == limit


DEPTH = 4


def found(
    histories: list[list[int]], depth: int = DEPTH, shortest: int = SHORTEST
) -> list[list[int]]:
    """The drafts of each row, in a slot where another row has left a longer text."""
    rows = [history_of(([*history, 0] * PIECE)[: PIECE + 1]) for history in histories]
    cursors = mx.array([len(history) - 1 for history in histories], mx.int32)
    tokens, matched = search(mx.concatenate(rows), cursors, depth, shortest)
    pairs = zip(tokens.tolist(), matched.tolist(), strict=True)
    return [drafts if match else [] for drafts, match in pairs]


def longest(history: list[int], shortest: int) -> tuple[int, int]:
    """The same search in plain Python: length and end of the best match before the last token."""
    best = (0, 0)
    for end in range(len(history) - 1):
        length = 0
        while length < min(LONGEST, end + 1) and history[end - length] == history[-1 - length]:
            length += 1
        if length >= shortest:
            best = max(best, (length, end))
    return best


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(st.lists(TEXTS, min_size=1, max_size=3), st.sampled_from([SHORTEST, BEFORE_OWN]))
def test_the_latest_of_the_longest_matches_is_found(
    histories: list[list[int]], shortest: int
) -> None:
    for history, drafts in zip(histories, found(histories, shortest=shortest), strict=True):
        length, end = longest(history, shortest)
        after = history[end + 1 :]
        assert drafts == ([after[place % len(after)] for place in range(DEPTH)] if length else [])


@given(TEXTS, st.integers(0, 40), st.sampled_from([SHORTEST, BEFORE_OWN]))
def test_the_host_knows_of_a_match_without_a_search(
    history: list[int], read: int, shortest: int
) -> None:
    runs = Runs(history[:read], shortest)
    runs.commit(history[read:])

    assert runs.recurs == (longest(history, shortest) != (0, 0))


def test_two_tokens_in_common_are_no_match() -> None:
    assert found([[1, 2, 3, 4, 8, 2, 3]]) == [[]]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert found([[*[1, 2, 3] * 4]], depth=7) == [[1, 2, 3, 1, 2, 3, 1]]


def stepped(history: list[int], own: int, depth: int) -> dict[str, mx.array]:
    """The state after a greedy step of a row with this history."""
    plan = Plan.of([GREEDY])
    settings = params([GREEDY], plan)
    settings |= {"active": mx.array([1], mx.int32), "depth": mx.array([depth], mx.int32)}
    values = dict.fromkeys(("body_lengths", "shifts", "accepted", "offered", "source"), 0)
    values |= {"pending": history[-1], "cursors": len(history) - 1}
    state = {name: mx.array([value], mx.int32) for name, value in values.items()}
    state["table"], state["entries"] = mx.zeros((1, 1), mx.int32), mx.zeros((1,), mx.int32)
    state["history"] = widened(history_of(history), LONGEST + PIECE)
    model: Any = TableModel(closeness=0.6)
    return whole_step(model, state, settings, plan, depth, own)[1]


def test_a_match_may_begin_in_the_prompt_and_end_with_the_sampled_token() -> None:
    sampled = stepped([9, 8, 2], own=0, depth=3)["pending"].item()

    after = stepped([9, 8, 2, sampled, 7, 9, 8, 2], own=0, depth=3)

    assert after["drafts"].tolist() == [[7, 9, 8]]
    assert after["offered"].tolist() == [3]
    assert SOURCES[after["source"].item()] == "lookup"


@pytest.mark.parametrize(
    ("own", "shortest"),
    [(0, SHORTEST), (2, BEFORE_OWN)],
)
def test_only_long_matches_go_before_what_the_model_drafts_itself(own: int, shortest: int) -> None:
    sampled = stepped([2], own=0, depth=0)["pending"].item()
    sources = {}
    for length in range(2, LONGEST + 1):
        ending = [*range(10, 8 + length), 2]
        after = stepped([*ending, sampled, 30, *ending], own, 2)
        sources[length] = SOURCES[after["source"].item()]

    long = range(shortest, LONGEST + 1)
    assert sources == dict.fromkeys(range(2, LONGEST + 1), "model") | dict.fromkeys(long, "lookup")


def test_suspended_rows_keep_their_history(qwen: Loaded) -> None:
    wanted = run(qwen.decoder(), rows(SEEDED))
    decoder = qwen.decoder(2, 6)
    got: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def decode(steps: int) -> None:
        for _ in range(steps):
            for outcome in decoder.step():
                got[outcome.row_id] += [sampled.token for sampled in outcome.tokens]

    entered = {each.row_id: enter(decoder, each) for each in rows(SEEDED)}
    decode(4)
    decoder.suspend(entered["loop"])
    decode(5)
    decoder.resume(entered["loop"])
    decoder.suspend(entered["words"])
    decode(3)
    decoder.resume(entered["words"])
    histories = decoder.state["history"]
    for name, tokens in got.items():
        known = [*PROMPTS[name], *tokens]
        index = entered[name].slot
        assert histories[index, LEAD : LEAD + len(known)].tolist() == known
    decode(TOKENS)

    assert {name: tokens[:TOKENS] for name, tokens in got.items()} == wanted


def test_an_interrupted_row_goes_on_as_if_it_had_not_been(qwen: Loaded) -> None:
    [whole] = [run(qwen.decoder(), [r])["loop"] for r in rows(SEEDED) if r.row_id == "loop"]
    decoder = qwen.decoder(2, 8)
    enter(decoder, row("loop", PROMPTS["loop"], TOKENS, SEEDED), whole[:17])
    got: list[int] = []
    while len(got) < TOKENS - 17:
        for outcome in decoder.step():
            got += [sampled.token for sampled in outcome.tokens]

    assert got[: TOKENS - 17] == whole[17:]


@pytest.mark.parametrize("own", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_steps_without_drafts_say_which_rows_have_a_match(demo: Loaded, own: int) -> None:
    decoder = demo.decoder(own, 8)
    prompts = {"loop": demo.tokenizer.encode(LOOP), "short": [3]}
    for name, prompt in prompts.items():
        enter(decoder, row(name, prompt, TOKENS))
    outcomes = [outcome for _ in range(20) for outcome in decoder.step(0)]
    sources = {name: [o.source for o in outcomes if o.row_id == name] for name in prompts}

    assert all(outcome.drafted == 0 for outcome in outcomes)
    assert sources["short"][:2] == ["model", "model"]
    assert set(sources["loop"][8:]) == {"lookup"}
