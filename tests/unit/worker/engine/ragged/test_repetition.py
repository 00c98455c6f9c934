"""Rows that repeat themselves end at one token in every mode; their neighbours do not notice."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import pytest

from omlx_producer.wire import RepetitionDetection
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.row import Row, Sampling
from tests.helpers.constrained import Ended, free, play
from tests.helpers.decoding import Loaded, row

HOT = Sampling(temperature=0.9, top_p=0.95, seed=5)
SLOW = [(0, 0), (1, 0), (3, 0), (0, 8)]
WATCHED = RepetitionDetection(max_pattern_size=20, min_count=8)


def looping(demo: Loaded, loops: RepetitionDetection | None = WATCHED) -> Row:
    """A prompt at which the demo model, greedy, comes to repeat itself."""
    made = row("x", demo.tokenizer.encode("def add(a, b):\n"), 170)
    return replace(made, repetition=loops)


@pytest.fixture(scope="module")
def drafting(demo: Loaded) -> RaggedDecoder:
    return demo.decoder(3, 8)


@pytest.fixture(scope="module")
def ended(drafting: RaggedDecoder, demo: Loaded) -> Ended:
    """The row in a step that drafts, and in company."""
    return play(drafting, [free("f", HOT), looping(demo)])["x"]


def test_a_loop_ends_as_soon_as_it_has_repeated_often_enough(demo: Loaded, ended: Ended) -> None:
    whole = play(demo.decoder(0), [looping(demo, None)])["x"]

    assert (whole.reason, ended.reason) == ("length", "repetition")
    tokens = list(ended.tokens)
    assert tokens == list(whole.tokens[: len(tokens)])
    assert whole.text.startswith(ended.text)
    patterns = [n for n in range(1, 21) if tokens[-8 * n :] == tokens[-n:] * 8]
    assert patterns
    assert not [n for n in range(1, 21) if tokens[-8 * n - 1 : -1] == tokens[-n - 1 : -1] * 8]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "lookup"), SLOW)
def test_a_loop_ends_at_one_token_whatever_drafts(
    demo: Loaded, ended: Ended, depth: int, lookup: int
) -> None:
    alone = play(demo.decoder(depth, lookup), [looping(demo)])["x"]
    assert alone == replace(ended, steps=ANY)


def test_rows_that_do_not_repeat_themselves_are_untouched(
    demo: Loaded, drafting: RaggedDecoder
) -> None:
    plain = [free("f", HOT), free("g")]
    wanted = play(drafting, plain)

    watched = [replace(each, repetition=WATCHED) for each in plain]
    together = play(drafting, [*watched, looping(demo)])

    assert together["x"].reason == "repetition"
    assert {name: together[name] for name in "fg"} == wanted


def test_a_loop_that_was_interrupted_ends_at_the_same_token(
    demo: Loaded, drafting: RaggedDecoder, ended: Ended
) -> None:
    for length in (len(ended.tokens) - 20, len(ended.tokens) - 1):
        resumed = replace(looping(demo), generated=ended.tokens[:length])
        assert play(drafting, [resumed])["x"] == replace(ended, steps=ANY)
