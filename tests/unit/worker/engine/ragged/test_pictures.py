"""Rows with pictures give the text of a model that reads them whole, in any company."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels.window import Window, own_pages
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.models.draft_model import DraftModel
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.towers.looks import MOST_KEPT, Looks
from tests.helpers.decoding import Loaded, enter, row
from tests.helpers.families import tiny
from tests.helpers.pictures import SmallTower, greedy, png, prompt_of

TOKENS = 6
HIDDEN = 256
SLOW = [(2, 4, 5), (0, 0, 7), (2, 0, 512), (0, 3, 64)]
Prompt = tuple[list[int], tuple[Picture, ...]]
Told = list[tuple[int, Any]]


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 4000), k=count)


PROMPTS: dict[str, Prompt] = {
    "without": prompt_of(words(20, 0)),
    "between": prompt_of(words(5, 1), png(4, 3, 1), words(7, 2)),
    "before": prompt_of(png(5, 2, 2), words(9, 3)),
    "two": prompt_of(words(5, 4), png(4, 3, 3), words(3, 5), png(2, 6, 4), words(4, 6)),
    "five": prompt_of(
        *(part for n in range(5) for part in (words(2, n), png(3, 3, n))), words(2, 7)
    ),
}


LIKELIEST = Sampling(temperature=0.0, top_logprobs=0)


@cache
def wanted(name: str) -> Told:
    return told(PROMPTS[name])


def told(prompt: Prompt) -> Told:
    """What a prompt is to give: tokens, and their log-probabilities within what is rounded."""
    found = greedy(Loaded.demo().network, SmallTower(HIDDEN), *prompt, TOKENS)
    return [(token, pytest.approx(logprob, abs=1e-4)) for token, logprob in found]


def request(name: str, prompt: Prompt, **changes: Any) -> RowRequest:
    return replace(row(name, prompt[0], TOKENS, LIKELIEST), pictures=prompt[1], **changes)


def a_decoder(depth: int = 0, lookup: int = 0, *, keeps: bool = False) -> RaggedDecoder:
    model = as_ragged(Loaded.demo().network, drafts=depth > 0, checks=False)
    model.looks = Looks(SmallTower(HIDDEN))
    kept: Callable[[RaggedDecoder], PrefixCache] | None = None
    if keeps:
        kept = partial(PrefixCache, LayerSpecs.of(model), 1 << 30)
    return RaggedDecoder(model, depth, lookup, kept)


def tower_of(decoder: RaggedDecoder) -> SmallTower:
    looks = decoder._model.looks
    assert looks is not None
    assert isinstance(looks.tower, SmallTower)
    return looks.tower


def texts(
    decoder: RaggedDecoder, rows: Sequence[Row], chunk: int = 512, *, together: bool = False
) -> dict[str, Told]:
    """What rows give, read one after the other beside the steps of others, or in one window."""
    found: dict[str, Told] = {each.row_id: [] for each in rows}
    asked = {each.row_id: TOKENS - each.produced for each in rows}
    for each in rows:
        decoder.add(each)
    while any(len(found[name]) < count for name, count in asked.items()):
        reading = [each for each in rows if each.left > 0][: None if together else 1]
        if reading:
            decoder.read(dict.fromkeys(reading, chunk))
        for step in decoder.step():
            found[step.row_id] += [(each.token, each.logprob) for each in step.tokens]
    return {name: found[name][:count] for name, count in asked.items()}


@pytest.mark.parametrize(
    ("depth", "lookup", "chunk", "names"),
    [
        (2, 4, 5, ["without", "two"]),
        *(pytest.param(*each, list(PROMPTS), marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_rows_with_and_without_pictures_are_read_beside_one_another(
    depth: int, lookup: int, chunk: int, names: list[str]
) -> None:
    rows = [Row(request(name, PROMPTS[name])) for name in names]
    found = texts(a_decoder(depth, lookup), rows, chunk)
    assert found == {name: wanted(name) for name in names}


def test_a_draft_model_with_heads_of_another_size_reads_past_pictures() -> None:
    model = as_ragged(Loaded.demo().network, drafts=False, checks=False)
    model.looks = Looks(SmallTower(HIDDEN))
    model.drafter = DraftModel(as_ragged(tiny("llama", head_dim=32)), model.vocabulary)
    found = texts(RaggedDecoder(model, 2), [Row(request("two", PROMPTS["two"]))])
    assert found == {"two": wanted("two")}


def test_rows_with_pictures_share_a_window_with_one_another_alone() -> None:
    decoder = a_decoder()
    windows, prefill = list[tuple[int, bool]](), decoder._model.prefill

    def recorded(tokens: mx.array, caches: Any, window: Window) -> mx.array:
        windows.append((tokens.shape[0], window.positions is not None))
        return prefill(tokens, caches, window)

    with patch.object(decoder._model, "prefill", recorded):
        rows = [Row(request(name, prompt)) for name, prompt in PROMPTS.items()]
        found = texts(decoder, rows, together=True)
    assert found == {name: wanted(name) for name in PROMPTS}
    assert sorted(windows) == [(1, False), (4, True)]


@pytest.mark.parametrize(
    "done", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in range(TOKENS) if n != 3)]
)
def test_a_text_goes_on_after_tokens_of_an_earlier_run(done: int) -> None:
    decoder = a_decoder(2)
    before = [token for token, _ in wanted("two")[:done]]
    found = texts(decoder, [Row(request("two", PROMPTS["two"]), generated=before)], 9)["two"]
    assert found == wanted("two")[done:]


def test_a_suspended_row_goes_on_behind_its_pictures() -> None:
    decoder, found = a_decoder(2), Told()
    entered = enter(decoder, request("two", PROMPTS["two"]))
    for step in range(TOKENS + 4):
        if step == 2:
            decoder.suspend(entered)
        if step == 4:
            enter(decoder, request("between", PROMPTS["between"]))
            decoder.resume(entered)
        for outcome in decoder.step():
            if outcome.row is entered:
                found += [(each.token, each.logprob) for each in outcome.tokens]
    assert found[:TOKENS] == wanted("two")


class TestPrefixes:
    """What is kept of a picture serves the same picture alone."""

    BEFORE, AFTER = words(3, 8), words(6, 9)

    def read(self, decoder: RaggedDecoder, name: str, prompt: Prompt) -> Row:
        """Read and drop a row, all of whose prompt is kept."""
        entered = Row(request(name, prompt))
        entered.stops = {len(prompt[0]) - 1, prompt[1][0].end}
        enter(decoder, entered, chunk=512 if decoder.prefixes is None else prompt[1][0].end)
        decoder.leave(entered)
        return entered

    def asked(self, decoder: RaggedDecoder, picture: bytes) -> tuple[int | None, Told]:
        """Tokens that were kept of a prompt with this picture, and its text."""
        prompt = prompt_of(self.BEFORE, picture, self.AFTER)
        entered = Row(request("asked", prompt))
        found = texts(decoder, [entered])["asked"]
        return entered.cached, found

    def wanted(self, picture: bytes) -> Told:
        return told(prompt_of(self.BEFORE, picture, self.AFTER))

    def test_another_question_about_a_picture_reads_it_no_more(self) -> None:
        decoder = a_decoder(keeps=True)
        self.read(decoder, "first", prompt_of(self.BEFORE, png(4, 3, 5), words(5, 10)))
        looks = tower_of(decoder).looks
        cached, found = self.asked(decoder, png(4, 3, 5))
        assert (cached, found) == (3 + 12, self.wanted(png(4, 3, 5)))
        assert tower_of(decoder).looks == looks

    def test_another_picture_of_the_same_size_is_read(self) -> None:
        decoder = a_decoder(keeps=True)
        self.read(decoder, "first", prompt_of(self.BEFORE, png(4, 3, 5), words(5, 10)))
        cached, found = self.asked(decoder, png(4, 3, 6))
        assert (cached, found) == (0, self.wanted(png(4, 3, 6)))


def test_a_tower_looks_once_at_a_picture_of_several_rows() -> None:
    decoder = a_decoder()
    texts(decoder, [Row(request(f"{n}", PROMPTS["between"])) for n in range(3)])
    assert tower_of(decoder).looks == 1


def test_vectors_go_with_the_last_window_that_takes_them() -> None:
    decoder = a_decoder()
    entered = enter(decoder, request("five", PROMPTS["five"]), chunk=4)
    assert decoder.rows[entered].seen == {}


def test_tokens_of_a_picture_see_one_another_in_layers_with_a_sliding_window_alone() -> None:
    window = Window.of_prompts([0], [6], 6, own_pages(1, 1))
    window = replace(window, blocks=mx.array([[0, 1, 1, 1, 0, 2]]))

    def seen(sliding: int) -> list[list[int]]:
        _, tail = window.masks(sliding)
        rows: list[list[bool]] = tail[0, 0].tolist()  # type: ignore[assignment]
        return [[place for place, sees in enumerate(row) if sees] for row in rows]

    assert seen(3) == [[0], [0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert seen(0) == [[*range(n + 1)] for n in range(6)]


def test_room_for_vectors_is_counted_until_they_are_read_and_for_those_that_stay() -> None:
    decoder = a_decoder()
    blind = RaggedDecoder(as_ragged(Loaded.demo().network, drafts=False, checks=False))
    asked = request("two", PROMPTS["two"])
    looks = decoder._model.looks
    assert looks is not None
    for left, more in ((len(asked.prompt), looks.bytes_for([24])), (0, MOST_KEPT)):
        size = asked.size(left)
        assert decoder.bytes_for([size]) - blind.bytes_for([size]) == more
