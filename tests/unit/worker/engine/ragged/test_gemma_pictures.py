"""Rows of a Gemma 4 with pictures give the text of a model that reads them whole."""

from __future__ import annotations

import random

import pytest

from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import enter, run
from tests.helpers.gemma_towers import Gemma, write_gemma
from tests.helpers.towers import png

TOKENS = 8


@pytest.fixture(scope="module", params=[None, "vision"], ids=["causal", "both ways"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    path = tmp_path_factory.mktemp("gemma")
    return Gemma.at(write_gemma(path, use_bidirectional_attention=request.param))


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.fixture(scope="module")
def rows(gemma: Gemma) -> dict[str, RowRequest]:
    """Their pictures are longer than the sliding window."""
    asked: dict[str, list[list[int] | bytes]] = {
        "without": [words(40, 0)],
        "between": [words(9, 1), png(80, 90), words(7, 2)],
        "before": [png(120, 70, seed=1), words(5, 3)],
        "two": [words(3, 4), png(80, 90), words(4, 5), png(30, 110, seed=2), words(6, 6)],
    }
    return {name: gemma.request(name, TOKENS, *parts) for name, parts in asked.items()}


@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_with_and_without_pictures_decode_beside_one_another(
    gemma: Gemma, rows: dict[str, RowRequest], chunk: int
) -> None:
    found = run(gemma.decoder(), list(rows.values()), chunk=chunk)

    assert found == {name: gemma.likeliest(rows[name], text) for name, text in found.items()}


def test_another_question_about_a_picture_reads_it_no_more(gemma: Gemma) -> None:
    decoder = gemma.decoder(keeps=True)
    asked = [
        gemma.request(name, TOKENS, words(9, 1), png(80, 90), words(count, 7))
        for name, count in (("first", 3), ("second", 12))
    ]
    first, second = (Row(each) for each in asked)
    shared = asked[0].pictures[0].end
    first.stops = {shared}
    decoder.leave(enter(decoder, first, chunk=shared))

    [found] = run(decoder, [second], chunk=512).values()

    assert (second.cached, found) == (shared, gemma.likeliest(asked[1], found))
