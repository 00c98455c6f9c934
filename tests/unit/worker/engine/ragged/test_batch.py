"""The ragged batch decodes what mlx-lm decodes, whoever joins and leaves meanwhile."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.caches.layout import MIN_CAPACITY, Layout
from omlx_worker.engine.kernels.window import TAIL
from omlx_worker.engine.ragged.batch import SHRINK_AFTER
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.rows.row import Row
from tests.helpers.decoding import Loaded, enter, named, row, run, small_classes


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Random prompts of different lengths, a one-token prompt among them."""
    rng = random.Random(seed)
    lengths = [1, *(rng.randint(2, longest) for _ in range(count - 1))]
    rng.shuffle(lengths)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("rows", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_greedy_rows_equal_mlx_lm_with_staggered_arrivals(qwen: Loaded, rows: int) -> None:
    given = prompts(rows, seed=rows)
    wanted = {str(i): qwen.greedy(prompt, 40) for i, prompt in enumerate(given)}

    got = run(
        qwen.decoder(),
        [row(str(i), prompt, 40) for i, prompt in enumerate(given)],
        arrivals={str(i): 7 * i for i in range(rows)},
    )

    assert got == wanted
    assert any(len(set(tokens)) > 10 for tokens in wanted.values()), "the reference is trivial"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_the_demo_model_decodes_its_heldout_prompts_as_mlx_lm_does(
    demo: Loaded, heldout_prompts: list[str], rows: int
) -> None:
    given = [demo.tokenizer.encode(text) for text in heldout_prompts[:rows]]
    wanted = {str(i): demo.greedy(prompt, 24) for i, prompt in enumerate(given)}

    got = run(
        demo.decoder(),
        [row(str(i), prompt, 24) for i, prompt in enumerate(given)],
        arrivals={str(i): 5 * i for i in range(rows)},
        chunk=64,
    )

    assert got == wanted


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_rows_stay_exact_when_tails_fold_into_bodies_and_bodies_grow(
    qwen: Loaded, depth: int
) -> None:
    rng = random.Random(5)
    given = [[rng.randrange(256) for _ in range(length)] for length in (3, MIN_CAPACITY - 20)]
    tokens = TAIL + 60
    wanted = {str(i): qwen.greedy(prompt, tokens) for i, prompt in enumerate(given)}
    decoder = qwen.decoder(depth)

    got = run(decoder, [row(str(i), p, tokens) for i, p in enumerate(given)], chunk=128)

    assert got == wanted
    assert decoder.slots == 0, "an empty batch keeps no buffers"


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_all_lengths_stay_exact_side_by_side(qwen: Loaded, depth: int) -> None:
    rng = random.Random(6)
    lengths = {"short": 20, "outgrows": 200, "outgrows later": 120, "long": 600}
    given = {name: [rng.randrange(256) for _ in range(n)] for name, n in lengths.items()}
    tokens = 2 * TAIL + 120
    wanted = {name: qwen.greedy(prompt, tokens) for name, prompt in given.items()}
    decoder = qwen.decoder(depth)
    layouts: list[Layout] = []
    step = decoder.step

    def watched() -> Any:
        sampled = step()
        if decoder.layout not in layouts:
            layouts.append(decoder.layout)
        return sampled

    decoder.step = watched  # type: ignore[method-assign]
    rows = [row(name, prompt, tokens) for name, prompt in given.items()]
    with small_classes():
        got = run(decoder, rows, arrivals={"long": 4}, chunk=128)

    assert got == wanted
    assert len({layout.capacity for layout in layouts}) > 1, "no row ever outgrew its room"


@pytest.mark.slow
def test_a_row_that_leaves_early_does_not_disturb_the_others(qwen: Loaded) -> None:
    given = prompts(4, seed=11)
    wanted = {str(i): qwen.greedy(prompt, 60) for i, prompt in enumerate(given)}

    got = run(
        qwen.decoder(),
        [row(str(i), prompt, 60) for i, prompt in enumerate(given)],
        arrivals={"3": 20},
        departures={"0": 9, "1": 25},
    )

    assert got["0"] == wanted["0"][:9]
    assert got["1"] == wanted["1"][:25]
    assert (got["2"], got["3"]) == (wanted["2"], wanted["3"])


def test_a_batch_that_drains_is_compacted_without_changing_a_token(qwen: Loaded) -> None:
    given = prompts(8, seed=3)
    tokens = 3 * SHRINK_AFTER
    wanted = qwen.greedy(given[5], tokens)
    decoder = qwen.decoder()
    sizes: list[int] = [0]
    step = decoder.step

    def watched() -> Any:
        sampled = step()
        if decoder.slots != sizes[-1]:
            sizes.append(decoder.slots)
        return sampled

    decoder.step = watched  # type: ignore[method-assign]
    got = run(
        decoder,
        [row(str(i), prompt, tokens if i == 5 else 12) for i, prompt in enumerate(given)],
    )

    assert got["5"] == wanted
    assert sizes == [0, 1, 2, 4, 8, 1]


def test_a_seeded_row_draws_the_same_tokens_alone_and_in_any_company(qwen: Loaded) -> None:
    given = prompts(5, seed=2)
    hot = Sampling(temperature=0.9, filters={"top_p": 0.95, "top_k": 50}, seed=1234)
    alone = run(qwen.decoder(), [row("x", given[0], 40, hot)])["x"]

    others = [
        row(str(i), prompt, 30, Sampling(temperature=1.5, seed=i, presence_penalty=0.5))
        for i, prompt in enumerate(given[1:])
    ]
    arrivals = {"x": 9, "2": 20}
    together = run(qwen.decoder(), [*others, row("x", given[0], 40, hot)], arrivals=arrivals)

    assert together["x"] == alone
    assert run(qwen.decoder(), [row("x", given[0], 40, Sampling(seed=7))])["x"] != alone


def test_joins_and_leaves_within_a_bucket_compile_nothing_new(qwen: Loaded) -> None:
    decoder = qwen.decoder()
    given = prompts(40, seed=9, longest=30)
    rows = [row(str(i), prompt, 10 + i % 7) for i, prompt in enumerate(given)]
    run(decoder, rows[:4])
    traces = decoder._halves.traces

    run(decoder, rows[4:], arrivals={r.row_id: 4 * i for i, r in enumerate(rows[4:])})

    # Two traces for each bucket of slots that the run went through, however many joined.
    assert traces <= 6
    assert decoder._halves.traces <= 8


def test_a_step_waits_for_the_device_once_and_only_for_the_step_before(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = qwen.decoder()
    for i, prompt in enumerate(prompts(3, seed=4)):
        enter(decoder, row(str(i), prompt, 100))
    decoder.step()
    waits = []
    monkeypatch.setattr(mx, "eval", lambda *_: waits.append("eval"))
    before = decoder.reads

    for _ in range(20):
        assert len(decoder.step()) == 3

    assert waits == []
    assert decoder.reads - before == 20


def test_the_steps_after_a_batch_has_all_its_tokens_are_not_run(qwen: Loaded) -> None:
    decoder = qwen.decoder()
    enter(decoder, row("a", [1, 2, 3], 5))

    sampled = [decoder.step() for _ in range(8)]

    assert [len(part) for part in sampled] == [0, 1, 1, 1, 1, 1, 0, 0]
    assert decoder.reads == 5


def test_a_row_whose_joining_failed_leaves_its_slot_when_it_is_removed(qwen: Loaded) -> None:
    decoder = qwen.decoder()
    broken = patch.object(AttentionCache, "write", side_effect=RuntimeError("no memory"))
    with broken, pytest.raises(RuntimeError):
        enter(decoder, row("a", [1, 2, 3], 4))
    decoder.leave(named(decoder, "a"))
    assert decoder.slots == 0


def test_a_row_that_is_removed_while_it_is_read_or_suspended_gives_its_pages_back(
    qwen: Loaded,
) -> None:
    decoder = qwen.decoder()
    _, suspended = (enter(decoder, row(name, [1] * 9, 50)) for name in ("stays", "suspended"))
    read = Row(row("read", [2] * 40, 50))
    decoder.add(read)
    decoder.read({read: 16})
    decoder.step()
    decoder.suspend(suspended)
    assert decoder.pages.used == 3

    decoder.leave(suspended)
    decoder.leave(read)

    assert decoder.pages.used == 1


def test_steps_that_do_not_overlap_make_the_same_tokens_at_once(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.engine.ragged.decoder.OVERLAPS", False)
    decoder = qwen.decoder(2)
    entered = enter(decoder, row("a", [1, 2, 3], 20))

    assert [len(decoder.step()) for _ in range(3)] == [1, 1, 1]
    while decoder.step():
        pass

    assert entered.text_tokens()[:20] == qwen.greedy([1, 2, 3], 20)
