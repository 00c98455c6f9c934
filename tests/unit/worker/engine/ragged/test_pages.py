"""Pages are had as they are counted, and texts are those of undisturbed rows, whatever rows do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from omlx_worker.engine.caches.layout import Pages
from omlx_worker.engine.kernels.window import PAGE
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.page import Page
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row, Sampled
from tests.helpers.decoding import Loaded

DEPTH, MOST_ROWS, TOKENS = 2, 4, 16

TWO = Sampling(1.0, seed=7, logit_bias=dict.fromkeys([3, 200], 100.0), top_logprobs=0)
"""A choice of two tokens, so that drafts of a model with random weights are accepted."""

SAMPLINGS = [TWO, replace(TWO, seed=8, frequency_penalty=0.5), replace(TWO, temperature=2, seed=9)]


FAULTS: dict[str, Callable[[Pages, list[Page], list[Page]], object]] = {
    "freed early": lambda pages, row, _: pages.release(list(row)),
    "freed twice": lambda pages, row, _: [pages.release(list(row)) for _ in range(2)],
    "kept by nobody": lambda pages, row, _: pages.keep(row[:1]),
    "dropped, and still kept": lambda pages, _, kept: pages.drop(kept),
    "had by nobody": lambda _, row, kept: row.pop(),  # noqa: ARG005
    "had twice": lambda _, row, kept: row.append(row[0]),  # noqa: ARG005
    "at another place": lambda _, row, kept: setattr(row[0], "index", 3),  # noqa: ARG005
    "one too many": lambda pages, *_: setattr(pages, "used", 3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_that_is_not_had_as_counted_is_found(fault: str) -> None:
    pages = Pages(4)
    row = pages.take(2)
    pages.keep(kept := row[:1])
    assert pages.miscounted(row, kept) == 0
    FAULTS[fault](pages, row, kept)
    assert pages.miscounted(row, kept)


class Walk:
    """Rows that begin alike, read, suspended, interrupted and dropped at random.

    Attributes:
        texts: what rows have sampled, by their ids, which begin with that of their kind.
        cached, accepted: tokens from the tree, and drafts.
    """

    def __init__(self, loaded: Loaded, kinds: list[RowRequest], chance: random.Random) -> None:
        model = as_ragged(loaded.network, drafts=True, checks=False)
        specs = LayerSpecs.of(model)
        self.room = 8 * PAGE * specs.token_bytes
        prefixes = partial(PrefixCache, specs, self.room)
        self.decoder = RaggedDecoder(model, DEPTH, make_prefixes=prefixes)
        self.texts: dict[str, list[Sampled]] = {}
        self.cached = self.accepted = 0
        self._chance, self._kinds = chance, kinds
        self._names = 0
        self._rows: dict[str, Row] = {}
        self._suspended: set[str] = set()

    def enter(self, row: Row) -> None:
        self._rows[row.row_id] = row
        self.texts.setdefault(row.row_id, [])
        self.decoder.add(row)
        self.cached += row.computed

    def add(self) -> None:
        if len(self._rows) < MOST_ROWS:
            kind = self._chance.choice(self._kinds)
            new = replace(kind, row_id=f"{kind.row_id} {self._names}")
            if not self._chance.randrange(5):
                new = replace(new, max_tokens=0, prompt_logprobs=0)
            self._names += 1
            self.enter(Row(new))

    def read(self) -> None:
        reading = [row for _, row in sorted(self._rows.items()) if not self._runs(row)]
        rows = [row for row in reading if self._chance.randrange(3)]
        tokens = {row: self._chance.choice([5, 30, PAGE, 200]) for row in rows}
        for row, count in tokens.items():
            if self._chance.randrange(2):
                row.stops.add(row.computed + min(count, row.left))
        self.decoder.read(tokens)
        for row in rows:
            if not (row.left or row.request.max_tokens):
                del self._rows[row.row_id]

    def step(self) -> None:
        depth = self._chance.choice([0, DEPTH, DEPTH])
        for step in self.decoder.step(depth):
            self.accepted += step.accepted
            self.texts[step.row_id] += step.tokens
        for name in sorted(self._rows):
            if len(self.texts[name]) >= TOKENS:
                self.decoder.finish(self._leave(name))

    def suspend(self) -> None:
        if name := self._one_that_runs():
            self.decoder.suspend(self._rows[name])
            self._suspended.add(name)

    def resume(self) -> None:
        if self._suspended:
            name = min(self._suspended)
            self._suspended.remove(name)
            self.decoder.resume(self._rows[name])

    def remove(self) -> None:
        if self._rows:
            name = self._chance.choice(sorted(self._rows))
            self.decoder.leave(self._leave(name))

    def interrupt(self) -> None:
        if name := self._one_that_runs():
            row = self._leave(name)
            self.decoder.leave(row)
            tokens = [sampled.token for sampled in self.texts[name]]
            self.enter(Row(row.request, generated=tokens))

    def evict(self) -> None:
        self.decoder.limit_prefixes(self._chance.choice([0, self.room // 2, self.room]))

    def end(self) -> None:
        for name in list(self._rows):
            self.decoder.leave(self._leave(name))
        self.decoder.limit_prefixes(0)

    def _one_that_runs(self) -> str | None:
        names = sorted(name for name, row in self._rows.items() if row.slot is not None)
        return self._chance.choice(names) if names else None

    def _runs(self, row: Row) -> bool:
        return row.slot is not None or row.row_id in self._suspended

    def _leave(self, name: str) -> Row:
        self._suspended.discard(name)
        return self._rows.pop(name)


def undisturbed(loaded: Loaded, row: RowRequest) -> list[Sampled]:
    walk = Walk(loaded, [], random.Random(0))
    walk.enter(Row(row))
    while len(walk.texts[row.row_id]) < TOKENS:
        walk.read()
        walk.step()
    return walk.texts[row.row_id]


def test_pages_are_counted_and_texts_stay_the_same_on_a_random_walk(qwen: Loaded) -> None:
    chance = random.Random(1)
    beginning = [chance.randrange(256) for _ in range(PAGE)]
    kinds = [
        RowRequest(str(n), [*beginning[: 24 * n], n], TOKENS, sampling, goes_on=True)
        for n, sampling in enumerate(SAMPLINGS, 1)
    ]
    wanted = {row.row_id: undisturbed(qwen, row) for row in kinds}
    walk = Walk(qwen, kinds, chance)
    often = [walk.add, walk.read, walk.suspend, walk.resume, *[walk.step] * 4]

    for _ in range(400):
        chance.choice([*often * 6, walk.remove, walk.interrupt, walk.evict])()
        assert walk.decoder.miscounted_pages() == 0

    walk.end()
    assert walk.decoder.pages.used == walk.decoder.miscounted_pages() == 0
    for name, text in walk.texts.items():
        for got, expected in zip(text, wanted[name.split()[0]], strict=False):
            assert got.token == expected.token
            assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)
    assert walk.cached > 250, "the walk is trivial"
    assert walk.accepted > 40, "the walk is trivial"
