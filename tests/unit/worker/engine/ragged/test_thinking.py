"""Thinking ends at its budget, at one token in every mode, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import mlx.core as mx
import pytest

from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.masks import fill
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.thinking import Thinking, Thoughts
from tests.helpers.constrained import constrained, free, play
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run
from tests.helpers.markups import thinking

HOT = Sampling(temperature=0.9, filters={"top_p": 0.95}, seed=5)
BUDGET, TOKENS = 7, 30
SLOW = [(1, 0), (0, 8), (2, 4)]


@pytest.fixture(scope="module")
def drafting(demo: Loaded) -> RaggedDecoder:
    return demo.decoder(3, 8)


def markers(demo: Loaded) -> Thinking:
    """Thinking that the demo model often opens anew, and never ends by itself."""
    [line_end] = demo.tokenizer.encode("\n")
    return thinking((line_end,), tuple(demo.tokenizer.encode(" zebra!")), begun=True)


def thinker(
    demo: Loaded, sampling: Sampling = HOT, budget: int | None = BUDGET, **other: Any
) -> RowRequest:
    given = replace(markers(demo), budget=budget, **other)
    prompt = demo.tokenizer.encode("class Stack:\n    def push(self, x):\n")
    return row("x", prompt, TOKENS, replace(sampling, thinking=given))


def made_up(budget: int = BUDGET) -> RowRequest:
    """A row whose model thinks on by itself, since its weights are random."""
    made = thinking((7,), (8, 9), begun=True, budget=budget)
    return row("x", [1, 2, 3], TOKENS, replace(GREEDY, thinking=made))


def forced(row: RowRequest, tokens: Sequence[int]) -> list[int]:
    """The places of a row's tokens at which its budget leaves no choice; each is checked."""
    assert row.sampling.thinking is not None
    thoughts, places = Thoughts(row.sampling.thinking), []
    for place, token in enumerate(tokens):
        if thoughts.forced is not None:
            assert token == thoughts.forced
            places.append(place)
        thoughts.feed(token)
    return places


@pytest.mark.parametrize(
    "sampling",
    [HOT, *(pytest.param(s, marks=pytest.mark.slow) for s in (GREEDY,))],
)
def test_the_marker_comes_at_the_budget_and_the_answer_goes_on(
    demo: Loaded, drafting: RaggedDecoder, sampling: Sampling
) -> None:
    asked = thinker(demo, sampling)
    length = len(markers(demo).close)
    assert length > 1, "a marker of several tokens"

    ended = play(drafting, [asked])["x"]

    places = forced(asked, ended.tokens)
    assert places[:length] == list(range(BUDGET, BUDGET + length))
    assert len(ended.tokens) == TOKENS
    whole = play(drafting, [thinker(demo, sampling, None)])["x"]
    assert ended.tokens[:BUDGET] == whole.tokens[:BUDGET]
    assert forced(asked, ended.tokens[: BUDGET + length]) == places[:length]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "lookup"), [(0, 0), *SLOW])
@pytest.mark.parametrize("budget", [0, BUDGET])
def test_the_text_is_the_same_whatever_drafts_and_in_company(
    demo: Loaded, drafting: RaggedDecoder, budget: int, depth: int, lookup: int
) -> None:
    asked = thinker(demo, budget=budget)
    together = play(drafting, [free("f"), asked, free("g", HOT)])["x"]
    alone = play(demo.decoder(depth, lookup), [asked])["x"]
    assert alone == replace(together, steps=ANY)
    assert len(forced(asked, alone.tokens)) > 4, "it opens thinking anew, which is closed at once"


def test_steps_wait_for_the_host_where_the_budget_is_near_and_nowhere_else(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled = list[int]()

    def counted(*given: Any) -> tuple[mx.array, mx.array]:
        filled.append(1)
        return fill(*given)

    monkeypatch.setattr("omlx_worker.engine.ragged.decoder.fill", counted)
    decoder = qwen.decoder(2)
    run(decoder, [made_up(budget=1000)])
    assert not filled
    before = decoder.reads
    run(decoder, [made_up(budget=TOKENS - 10)])
    assert 0 < len(filled) < decoder.reads - before


@pytest.mark.slow
@pytest.mark.parametrize("company", ["free", "constrained"])
def test_rows_that_stay_within_their_budgets_are_untouched_beside_those_that_do_not(
    demo: Loaded, drafting: RaggedDecoder, company: str
) -> None:
    rows = [free("f", HOT), free("g")]
    rows += [constrained("c", sampling=HOT, tokens=60)] if company == "constrained" else []
    wanted = play(drafting, rows)

    wide = replace(markers(demo), budget=1000)
    budgeted = [replace(each, sampling=replace(each.sampling, thinking=wide)) for each in rows]
    together = play(drafting, [*budgeted, thinker(demo)])

    assert {name: together[name] for name in wanted} == wanted


def test_a_row_interrupted_within_its_end_marker_goes_on_with_the_rest_of_it(qwen: Loaded) -> None:
    asked = made_up()
    whole = run(qwen.decoder(), [asked])["x"]
    assert whole[BUDGET : BUDGET + 2] == [8, 9]

    resumed = Row(asked, generated=whole[: BUDGET + 1])

    rest = whole[BUDGET + 1 :]
    assert run(qwen.decoder(), [resumed], departures={"x": len(rest)})["x"] == rest


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, BUDGET, BUDGET + 1, TOKENS - 5])
def test_an_interrupted_row_goes_on_where_its_thinking_was(
    demo: Loaded, drafting: RaggedDecoder, length: int
) -> None:
    asked = thinker(demo)
    whole = play(drafting, [asked])["x"]
    resumed = Row(asked, generated=whole.tokens[:length])
    assert play(drafting, [resumed])["x"] == replace(whole, steps=ANY)


@pytest.mark.slow
def test_a_suspended_row_goes_on_where_its_thinking_was(
    demo: Loaded, drafting: RaggedDecoder
) -> None:
    asked = thinker(demo)
    whole = play(drafting, [asked])["x"]
    paused = play(drafting, [asked, free("f", HOT)], pause={"x": (3, 6)})["x"]
    assert paused == replace(whole, steps=ANY)


@pytest.mark.slow
def test_log_probabilities_of_what_is_forced_are_certain(
    demo: Loaded, drafting: RaggedDecoder
) -> None:
    asked = thinker(demo, replace(HOT, top_logprobs=2))
    row = enter(drafting, asked)
    steps = [step for _ in range(TOKENS) for step in drafting.step()]
    drafting.leave(row)
    sampled = [each for step in steps for each in step.tokens][:TOKENS]
    places = forced(asked, [each.token for each in sampled])
    assert places
    assert {sampled[place].logprob for place in places} == {0.0}
    assert {sampled[place].top for place in places} == {
        ((token, 0.0),) for token in markers(demo).close
    }
