"""Rows that repeat themselves end at one token in every mode; their neighbours do not notice."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import pytest

from omlx_producer.wire import RepetitionDetection
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.rows.text import RowText
from tests.helpers.constrained import Ended, free, play
from tests.helpers.decoding import Loaded, row

HOT = Sampling(temperature=0.9, filters={"top_p": 0.95}, seed=5)
SLOW = [(0, 0), (1, 0), (3, 0), (0, 8)]
WATCHED = RepetitionDetection(max_pattern_size=20, min_count=8)


def looping(demo: Loaded, loops: RepetitionDetection | None = WATCHED) -> RowRequest:
    """A prompt at which the demo model, greedy, comes to repeat itself."""
    made = row("x", demo.tokenizer.encode("def add(a, b):\n"), 170)
    return replace(made, repetition=loops)


@pytest.fixture(scope="module")
def drafting(demo: Loaded) -> RaggedDecoder:
    return demo.decoder(3, 8)


@pytest.fixture(scope="module")
def both(drafting: RaggedDecoder, demo: Loaded) -> dict[str, Ended]:
    """The row and one that does not repeat itself, in steps that draft."""
    return play(drafting, [free("f", HOT), looping(demo)])


@pytest.fixture(scope="module")
def ended(both: dict[str, Ended]) -> Ended:
    return both["x"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_row_that_does_not_repeat_itself_is_untouched(
    demo: Loaded, drafting: RaggedDecoder, both: dict[str, Ended]
) -> None:
    late = Row(looping(demo), generated=both["x"].tokens[:-10])
    watched = play(drafting, [replace(free("f", HOT), repetition=WATCHED), late])
    assert watched["x"].reason == "repetition"
    assert watched["f"] == replace(both["f"], steps=ANY)


@pytest.mark.slow
def test_a_loop_that_was_interrupted_ends_at_the_same_token(
    demo: Loaded, drafting: RaggedDecoder, ended: Ended
) -> None:
    for length in (len(ended.tokens) - 20, len(ended.tokens) - 1):
        resumed = Row(looping(demo), generated=ended.tokens[:length])
        assert play(drafting, [resumed])["x"] == replace(ended, steps=ANY)


def looped(depth: int, *rows: Row) -> dict[str, list[int]]:
    """The tokens of rows that a worker's decode loop runs to their ends."""
    engine = load_engine("demo", max_rows=4, depth=depth)
    loop = DecodeLoop(
        engine,
        MemoryBudget(1 << 30, 0, engine.bytes_for),
        Counters(),
        driver=DepthDriver(FixedPolicy(depth)),
        chunks=ChunkSize(64),
    )
    loop.add(rows)
    while loop.act() is not None:
        pass
    return {row.row_id: row.text_tokens() for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 3])
def test_a_loop_may_go_on_with_a_penalty_from_its_next_token(
    demo: Loaded, drafting: RaggedDecoder, ended: Ended, depth: int
) -> None:
    penalty = RepetitionDetection(max_pattern_size=20, min_count=8, repetition_penalty=1.3)
    asked = looping(demo, penalty)
    other = replace(free("f", HOT, tokens=20), repetition=penalty)

    tokens = looped(depth, Row(other), Row(asked, generated=ended.tokens[:-10]))

    sampling = replace(asked.sampling, repetition_penalty=1.3)
    resumed = Row(replace(asked, sampling=sampling, repetition=None), generated=ended.tokens)
    assert tuple(tokens["x"]) == play(drafting, [resumed])["x"].tokens
    assert tuple(tokens["f"]) == play(drafting, [free("f", HOT)])["f"].tokens[:20]


def test_a_text_that_repeats_itself_again_ends() -> None:
    text = RowText(
        RowRequest(
            *("x", [1], 99, Sampling()),
            repetition=RepetitionDetection(max_pattern_size=2, min_count=3, repetition_penalty=1.2),
        ),
        Loaded.demo().tokenizer,
    )
    pieces = [text.feed(token) for token in (5, 6, 5, 6, 5, 6, 6, 7, 7, 7)]
    assert [place for place, piece in enumerate(pieces) if piece.penalises] == [5]
    assert [place for place, piece in enumerate(pieces) if piece.finish_reason] == [9]
    assert text.penalty == 1.2
