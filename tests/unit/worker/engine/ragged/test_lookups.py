"""Rows whose drafts are looked up: the same text, whoever drafts, however deep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import pytest

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.engine.drafts.lookup import (
    BEFORE_OWN,
    GAP,
    LEAD,
    LONGEST,
    PIECE,
    SHORTEST,
    Lookup,
)
from omlx_worker.engine.ragged import lookups
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.lookups import Lookups
from omlx_worker.engine.ragged.recurrent_cache import widened
from omlx_worker.engine.ragged.step import RowStep
from omlx_worker.engine.row import SOURCES, Row, Sampling, Source
from tests.helpers.decoding import GREEDY, Loaded, row, run, small_classes

PROMPTS = {
    "loop": [5, 9, 13, 21, 34, 55, 89, 144] * 3,
    "short": [3],
    "words": [*range(40, 70), 7, 7, 7],
}
SEEDED = Sampling(temperature=0.7, top_p=0.95, seed=11)
TOKENS = 48


class Counting(RaggedDecoder):
    """Counts who drafted, and how many were accepted."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.accepted: Counter[Source] = Counter()

    def step(self, depths: object = None) -> list[RowStep]:
        steps = super().step(depths)  # type: ignore[arg-type]
        for outcome in steps:
            self.accepted[outcome.source] += outcome.accepted
        return steps


@pytest.fixture(autouse=True)
def small_buckets() -> Iterator[None]:
    with small_classes():
        yield


def rows(sampling: Sampling) -> list[Row]:
    return [row(name, prompt, TOKENS, sampling) for name, prompt in PROMPTS.items()]


@pytest.mark.parametrize(
    "sampling",
    [
        *(pytest.param(sampling, marks=pytest.mark.slow) for sampling in (GREEDY, SEEDED)),
        replace(SEEDED, repetition_penalty=1.2),
    ],
)
def test_a_text_is_the_same_at_every_depth_and_in_company(qwen: Loaded, sampling: Sampling) -> None:
    alone = {r.row_id: run(qwen.decoder(), [r])[r.row_id] for r in rows(sampling)}

    for own, lookup in ((0, Lookup(1)), (0, Lookup(8)), (2, Lookup(3)), (3, Lookup(8, ring=0))):
        decoder = qwen.decoder(own, lookup)
        assert run(decoder, rows(sampling), arrivals={"words": 4}) == alone, (own, lookup)


def test_a_text_in_the_ring_is_copied_in_few_steps(qwen: Loaded) -> None:
    model = qwen.decoder(0, Lookup())._model
    decoder = Counting(model, 0, Lookup(8))
    first = run(decoder, [row("first", PROMPTS["words"], TOKENS)])
    before, reads = decoder.accepted["lookup"], decoder.reads

    second = run(decoder, [row("second", PROMPTS["words"], TOKENS)])

    assert second["second"] == first["first"]
    assert decoder.accepted["lookup"] - before > TOKENS // 2
    assert decoder.reads - reads < TOKENS // 2


def test_a_row_that_is_not_cached_leaves_nothing_to_other_rows(qwen: Loaded) -> None:
    decoder = qwen.decoder(2, Lookup(2))
    lookups = decoder._lookups
    assert lookups
    assert lookups._ring

    run(decoder, [replace(row("own", PROMPTS["words"], TOKENS), cache=False)])

    assert mx.all(lookups._ring.tokens == GAP)
    run(decoder, [row("shared", PROMPTS["words"], TOKENS)])
    assert mx.any(lookups._ring.tokens != GAP)


def test_a_text_in_the_ring_is_found_by_rows_of_its_salt_alone(qwen: Loaded) -> None:
    model = qwen.decoder(0, Lookup())._model
    decoder = Counting(model, 0, Lookup(8))
    prompt = PROMPTS["words"]
    first = run(decoder, [replace(row("first", prompt, TOKENS), salt="theirs")])["first"]

    accepted = {}
    for salt in ("ours", None, "theirs"):
        before = decoder.accepted["lookup"]
        alike = replace(row("alike", prompt, TOKENS), salt=salt, cache=False)
        assert run(decoder, [alike])["alike"] == first
        accepted[salt] = decoder.accepted["lookup"] - before

    alone = Counting(model, 0, Lookup(8))
    run(alone, [row("alone", prompt, TOKENS)])
    assert accepted["ours"] == accepted[None] == alone.accepted["lookup"]
    assert accepted["theirs"] > accepted["ours"] + TOKENS // 4


def test_rows_of_many_salts_decode_side_by_side(qwen: Loaded) -> None:
    decoder = qwen.decoder(0, Lookup(8))
    assert decoder._lookups
    prompt = PROMPTS["words"]
    for salt in "abc":
        decoder._lookups.remember(mx.array([*prompt, *[ord(salt)] * 9], mx.int32), salt)
    wanted = qwen.greedy(prompt, TOKENS)

    rows = [replace(row(salt, prompt, TOKENS), salt=salt) for salt in "abcd"]

    assert run(decoder, rows) == dict.fromkeys("abcd", wanted)


def test_more_salts_than_are_known_at_a_time_find_nothing_of_each_other() -> None:
    with patch.object(lookups, "MOST_SALTS", 2):
        searching = Lookups(Lookup(8), 0, 300)
        numbers = [searching.owners([salt, None]).tolist() for salt in "abcab"]

    assert [none for _, none in numbers] == [0] * 5
    assert len({owner for owner, _ in numbers}) == 5


def test_a_row_may_have_any_limit_up_to_the_depth_of_lookups(qwen: Loaded) -> None:
    wanted = qwen.greedy(PROMPTS["loop"], TOKENS)
    for limit in (6, MAX_DRAFT_DEPTH):
        decoder = qwen.decoder(0, Lookup())
        run(decoder, [row("before", PROMPTS["loop"], TOKENS)])
        decoder.add(replace(row("loop", PROMPTS["loop"], TOKENS), depth=limit))
        while decoder.prefill({"loop": 100})["loop"]:
            pass
        tokens: list[int] = []
        drafted = 0
        while len(tokens) < TOKENS:
            for outcome in decoder.step():
                tokens += [sampled.token for sampled in outcome.tokens]
                drafted = max(drafted, outcome.drafted)
        assert tokens[:TOKENS] == wanted
        assert drafted == limit


def looked_up(lookups: Lookups, history: list[int], depth: int) -> dict[str, mx.array]:
    """The state after a step that sampled the last token of this history."""
    cursor = len(history) - 1
    state = lookups.begin(history[:-1])
    before = {
        "history": widened(state["history"], LONGEST + PIECE),
        "cursors": mx.array([cursor - 1], mx.int32),
    }
    after = {name: mx.array([0], mx.int32) for name in ("drafted", "source")}
    after |= {"cursors": mx.array([cursor], mx.int32)}
    sampled, limits = mx.array([history[-1:]], mx.int32), mx.array([min(depth, 2)], mx.int32)
    return lookups.step(before, after, sampled, limits, depth, ratio=False)


def test_a_match_may_begin_in_the_prompt_and_end_with_the_sampled_token() -> None:
    lookups = Lookups(Lookup(ring=0), own_depth=0, vocabulary=32)

    found = looked_up(lookups, [1, 2, 3, 4, 5, 1, 2, 3], depth=3)

    assert found["drafts"].tolist() == [[4, 5, 1]]
    assert found["drafted"].tolist() == [2]
    assert SOURCES[found["source"].item()] == "lookup"


@pytest.mark.parametrize(
    ("own", "depth", "shortest"),
    [(0, 0, SHORTEST), (0, 2, SHORTEST), (2, 0, BEFORE_OWN), (2, 2, BEFORE_OWN), (2, 3, SHORTEST)],
)
def test_only_long_matches_go_before_what_the_model_drafts_itself(
    own: int, depth: int, shortest: int
) -> None:
    lookups = Lookups(Lookup(ring=0), own_depth=own, vocabulary=32)
    sources = {}
    for length in range(1, LONGEST):
        history = [*range(length), 20, 21, *range(length)]
        sources[length] = SOURCES[looked_up(lookups, history, depth)["source"].item()]

    assert sources == {
        length: "lookup" if length >= shortest else "model" for length in range(1, LONGEST)
    }


def test_suspended_rows_keep_their_history(qwen: Loaded) -> None:
    wanted = run(qwen.decoder(), rows(SEEDED))
    decoder = qwen.decoder(2, Lookup(6))
    got: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def decode(steps: int) -> None:
        for _ in range(steps):
            for outcome in decoder.step():
                got[outcome.row_id] += [sampled.token for sampled in outcome.tokens]

    for each in rows(SEEDED):
        decoder.add(each)
        while decoder.prefill({each.row_id: 100})[each.row_id]:
            pass
    decode(4)
    decoder.suspend("loop")
    decode(5)
    decoder.resume("loop")
    decoder.suspend("words")
    decode(3)
    decoder.resume("words")
    histories = decoder._buffers.state["history"]
    for name, tokens in got.items():
        known = [*PROMPTS[name], *tokens]
        index = decoder._slots.find(name)
        assert histories[index, LEAD : LEAD + len(known)].tolist() == known
    decode(TOKENS)

    assert {name: tokens[:TOKENS] for name, tokens in got.items()} == wanted


def test_an_interrupted_row_goes_on_as_if_it_had_not_been(qwen: Loaded) -> None:
    [whole] = [run(qwen.decoder(), [r])["loop"] for r in rows(SEEDED) if r.row_id == "loop"]
    rest = replace(row("loop", PROMPTS["loop"], TOKENS, SEEDED), generated=tuple(whole[:17]))
    decoder = qwen.decoder(2, Lookup())
    decoder.add(rest)
    while decoder.prefill({"loop": 7})["loop"]:
        pass
    got: list[int] = []
    while len(got) < TOKENS - 17:
        for outcome in decoder.step():
            got += [sampled.token for sampled in outcome.tokens]

    assert got[: TOKENS - 17] == whole[17:]


def test_steps_without_drafts_say_which_rows_have_a_match(qwen: Loaded) -> None:
    decoder = qwen.decoder(0, Lookup())
    run(decoder, [row("before", PROMPTS["loop"], TOKENS)])
    for name in ("loop", "short"):
        decoder.add(row(name, PROMPTS[name], TOKENS))
    while any(decoder.prefill(dict.fromkeys(("loop", "short"), 100)).values()):
        pass
    outcomes = [outcome for _ in range(12) for outcome in decoder.step({"loop": 0, "short": 0})]
    sources = {name: [o.source for o in outcomes if o.row_id == name] for name in ("loop", "short")}

    assert all(outcome.drafted == 0 for outcome in outcomes)
    assert sources["short"][:2] == ["model", "model"]
    assert "lookup" in sources["loop"]
