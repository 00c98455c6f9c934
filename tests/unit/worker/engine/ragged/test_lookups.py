"""Rows whose drafts are looked up: the same text, whoever drafts, however deep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import mlx.core as mx
import pytest

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.engine.drafts.lookup import GAP, LEAD, LONGEST, PIECE, Lookup
from omlx_worker.engine.drafts.trust import PRIOR
from omlx_worker.engine.ragged import lookups
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.lookups import EVERY, Look, Lookups
from omlx_worker.engine.ragged.recurrent_cache import widened
from omlx_worker.engine.ragged.step import RowStep
from omlx_worker.engine.row import Row, Sampling
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
        self.accepted: Counter[bool] = Counter()

    def step(self, depths: object = None) -> list[RowStep]:
        steps = super().step(depths)  # type: ignore[arg-type]
        for outcome in steps:
            looked_up = outcome.look is not None and outcome.look.looked_up
            self.accepted[looked_up] += outcome.accepted
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
    before, reads = decoder.accepted[True], decoder.reads

    second = run(decoder, [row("second", PROMPTS["words"], TOKENS)])

    assert second["second"] == first["first"]
    assert decoder.accepted[True] - before > TOKENS // 2
    assert decoder.reads - reads < TOKENS // 2


def test_a_row_that_is_not_cached_leaves_nothing_to_other_rows(qwen: Loaded) -> None:
    decoder = qwen.decoder(2, Lookup(2))
    lookups = decoder._lookups
    assert lookups
    assert lookups._ring
    assert lookups._trust._own
    rates = [lookups._trust._own, *lookups._trust._matches.values()]

    run(decoder, [replace(row("own", PROMPTS["words"], TOKENS), cache=False)])

    assert mx.all(lookups._ring.tokens == GAP)
    assert {rate._tries for rate in rates} == {PRIOR}
    run(decoder, [row("shared", PROMPTS["words"], TOKENS)])
    assert mx.any(lookups._ring.tokens != GAP)
    assert max(rate._tries for rate in rates) > PRIOR


def test_a_text_in_the_ring_is_found_by_rows_of_its_salt_alone(qwen: Loaded) -> None:
    model = qwen.decoder(0, Lookup())._model
    decoder = Counting(model, 0, Lookup(8))
    prompt = PROMPTS["words"]
    first = run(decoder, [replace(row("first", prompt, TOKENS), salt="theirs")])["first"]

    accepted = {}
    for salt in ("ours", None, "theirs"):
        before = decoder.accepted[True]
        alike = replace(row("alike", prompt, TOKENS), salt=salt, cache=False)
        assert run(decoder, [alike])["alike"] == first
        accepted[salt] = decoder.accepted[True] - before

    alone = Counting(model, 0, Lookup(8))
    run(alone, [row("alone", prompt, TOKENS)])
    assert accepted["ours"] == accepted[None] == alone.accepted[True]
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


def looked_up(lookups: Lookups, depth: int) -> dict[str, mx.array]:
    """The state after a step that sampled 4, in which 1, 2, 3, 4 occurs for the second time."""
    state = lookups.begin([1, 2, 3, 4, 5, 1, 2, 3])
    before = state | {"history": widened(state["history"], LONGEST + PIECE)}
    before["cursors"] = mx.array([7], mx.int32)
    after = {"cursors": mx.array([8], mx.int32), "drafted": mx.array([0], mx.int32)}
    sampled, limits = mx.array([[4]], mx.int32), mx.array([2], mx.int32)
    return lookups.step(before, after, sampled, limits, depth, ratio=False)[1]


def test_a_match_may_begin_in_the_prompt_and_end_with_the_sampled_token() -> None:
    found = looked_up(Lookups(Lookup(ring=0), own_depth=0, vocabulary=32), depth=3)

    assert found["match"].tolist() == [4]
    assert found["drafts"].tolist() == [[5, 1, 2]]
    assert found["drafted"].tolist() == [2]


def test_any_match_drafts_where_a_step_is_too_deep_for_the_models_own() -> None:
    lookups = Lookups(Lookup(ring=0), own_depth=2, vocabulary=32)
    for _ in range(400):
        lookups._trust.own(right=True)
        lookups._trust.match(4, right=False)

    drafted = [looked_up(lookups, depth)["drafted"].item() for depth in (2, 8, 2)]

    assert drafted == [0, 2, 0]


def test_a_match_of_a_step_before_a_pause_is_not_counted_as_wrong() -> None:
    lookups = Lookups(Lookup(ring=0), own_depth=2, vocabulary=32)
    rate = lookups._trust._matches[4].value

    lookups.learn(Look(4, None, looked_up=True, found=None), 2, 2, teaches=True)

    assert lookups._trust._matches[4].value == rate


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


def test_steps_without_drafts_search_seldom_and_say_what_was_foretold(qwen: Loaded) -> None:
    decoder = qwen.decoder(0, Lookup())
    run(decoder, [row("before", PROMPTS["loop"], TOKENS)])
    decoder.add(row("loop", PROMPTS["loop"], TOKENS))
    while decoder.prefill({"loop": 100})["loop"]:
        pass
    tokens: list[int] = []
    looks, found, foretold = 0, [], []
    for _ in range(TOKENS):
        for outcome in decoder.step({"loop": 0}):
            assert outcome.drafted == 0
            tokens += [sampled.token for sampled in outcome.tokens]
            looks += outcome.look is not None
            found.append(outcome.look and outcome.look.found)
            foretold.append(outcome.look and outcome.look.foretold)

    assert tokens[:TOKENS] == qwen.greedy(PROMPTS["loop"], TOKENS)[: len(tokens)]
    # Only steps that search and those after them have anything to tell the host.
    assert looks <= 2 * (TOKENS // EVERY + 1)
    known = [right for right in foretold if right is not None]
    assert TOKENS // EVERY - 1 <= len(known) <= TOKENS // EVERY + 1
    assert sum(known) > len(known) // 2
    # What a search has found is compared with the step after it.
    assert [right is None for right in foretold[1:]] == [here is None for here in found[:-1]]
