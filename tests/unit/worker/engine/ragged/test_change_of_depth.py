"""The depth may change from step to step: no text changes with it, and few shapes are met."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.caches.recurrent_cache import RecurrentCache
from omlx_worker.engine.ragged.state import State
from omlx_worker.engine.ragged.step import fit
from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run

DEEPEST = 3
COMMITS = 1 + DEEPEST
"""A step judges as many drafts as it makes."""
FORWARDS = 1 + 3 * DEEPEST
"""After no drafts, after as many, and for each depth but the deepest after a deeper step."""


def recurrent(width: int) -> RecurrentCache:
    """A cache of two slots that keeps inputs of so many positions, each position its number."""
    positions = mx.broadcast_to(mx.arange(width)[None, :, None], (2, width, 4))
    kept = [positions, mx.broadcast_to(positions[..., None], (2, width, 4, 2))] if width else []
    return RecurrentCache([mx.zeros((2, 3, 4)), mx.zeros((2, 1, 4, 4)), *kept])


def drafted(depth: int) -> State:
    drafts = mx.broadcast_to(mx.arange(1, depth + 1, dtype=mx.int32), (2, depth))
    made = {"drafts": drafts} if depth else {}
    return {"offered": mx.array([depth, min(depth, 1)], mx.int32), **made}


@pytest.mark.parametrize(("made", "asked"), list(itertools.product(range(4), repeat=2)))
def test_drafts_are_cut_or_padded_and_none_is_judged_that_is_cut(made: int, asked: int) -> None:
    cache = recurrent(0)

    state = fit(drafted(made), [cache], asked, DEEPEST)

    assert state["offered"].tolist() == [min(made, asked), min(made, asked, 1)]
    if not asked:
        assert "drafts" not in state
        return
    padded = [*range(1, made + 1), 0, 0, 0][:asked]
    assert state["drafts"].tolist() == [padded, padded]


@pytest.mark.parametrize(("kept", "asked"), list(itertools.product(range(1, 5), range(4))))
def test_whatever_may_be_replayed_is_kept_in_one_of_two_widths(kept: int, asked: int) -> None:
    cache = recurrent(kept)

    fit(drafted(max(asked, 1)), [cache], asked, DEEPEST)

    if kept == 1 and not asked:
        assert cache.kept == [], "one position alone is committed already"
        return
    width = 1 + (asked if kept <= 1 + asked else DEEPEST)
    assert [array.shape[1] for array in cache.kept] == [width, width]
    assert cache.kept[0][1, :, 0].tolist() == [*range(kept), *[0] * (width - kept)]


def test_all_ways_from_one_depth_to_another_meet_few_shapes(qwen: Loaded) -> None:
    decoder = qwen.decoder(DEEPEST)
    enter(decoder, row("a", [1, 2, 3], 1000))
    decoder.step(0)
    met = []

    for _ in range(2):
        for pair in itertools.permutations(range(DEEPEST + 1), 2):
            for depth in pair:
                for _ in range(2):
                    decoder.step(depth)
        met.append(decoder._halves.traces)

    assert decoder.layout.capacity == 256, "a larger body is another shape"
    assert met == [FORWARDS + COMMITS] * 2


def test_a_batch_that_begins_anew_meets_the_shapes_of_the_last_one(qwen: Loaded) -> None:
    decoder, met = qwen.decoder(DEEPEST), []
    for name in ("a", "b"):
        entered = enter(decoder, row(name, [1, 2, 3], 1000))
        for _ in range(4):
            decoder.step(DEEPEST)
        decoder.leave(entered)
        met.append(decoder._halves.traces)

    assert met[0] == met[1] > 0


SETTINGS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(
        Sampling(temperature=0.8, seed=5, presence_penalty=0.4, repetition_penalty=1.2),
        id="sampled, penalties",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_texts_are_the_same_whatever_depth_each_row_has_in_each_step(
    demo: Loaded, heldout_prompts: list[str], sampling: Sampling, seed: int
) -> None:
    prompts = [demo.tokenizer.encode(prompt)[:40] for prompt in heldout_prompts[:4]]
    rows = [
        RowRequest(str(n), prompt, 40, sampling, depth=depth)
        for n, (prompt, depth) in enumerate(zip(prompts, (None, 1, 2, 0), strict=True))
    ]
    wanted = run(demo.decoder(), rows)
    rng, decoder = random.Random(seed), demo.decoder(DEEPEST)
    step, depth, judged = decoder.step, 0, set[int]()

    def changing(_: int | None = None) -> Any:
        nonlocal depth
        if rng.random() < 0.5:
            depth = rng.randrange(DEEPEST + 1)
        landed = step(depth)
        judged.update(outcome.drafted for outcome in landed)
        return landed

    decoder.step = changing  # type: ignore[method-assign]

    assert run(decoder, rows, arrivals={"1": 3, "2": 9, "3": 20}) == wanted
    assert judged == {0, 1, 2, 3}
