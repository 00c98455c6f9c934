"""What a step may cost besides arithmetic: no waits, no whole-cache copies, no recompilation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from scripts.bench.mixed_lengths import join_made_up
from tests.helpers.decoding import GREEDY, Loaded, enter, row, run
from tests.helpers.families import tiny

LONG = 9_300
ROWS = 8


def long_batch(network: nn.Module, depth: int = 0) -> RaggedDecoder:
    """A batch whose bodies are large, their contents made up."""
    model = as_ragged(network, drafts=depth > 0)
    batch = RaggedDecoder(model, depth)
    rng = random.Random(1)
    for index in range(ROWS):
        prompt = [rng.randrange(256) for _ in range(LONG + 1)]
        join_made_up(batch, model, Row(RowRequest(str(index), prompt, 10_000, GREEDY)))
    return batch


def bodies(batch: RaggedDecoder) -> list[mx.array]:
    caches = [cache for cache in batch.caches if isinstance(cache, AttentionCache)]
    return [array for cache in caches for array in cache.pool.arrays]


def addresses(batch: RaggedDecoder) -> list[int]:
    """Where the bodies are in memory."""
    mx.eval(bodies(batch))
    return [np.asarray(memoryview(array)).ctypes.data for array in bodies(batch)]  # type: ignore[arg-type]


def test_no_step_copies_the_bodies_while_the_one_before_is_in_flight() -> None:
    batch = long_batch(tiny("llama"))
    for _ in range(4):
        batch.step()
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    for _ in range(20):
        batch.step()

    whole = sum(array.nbytes for array in bodies(batch))
    assert whole >= 32 * 2**20, "too small to tell"
    # The plain form copies the pages of one layer at a time.
    assert mx.get_peak_memory() - before < whole / 2


def test_reading_a_prompt_writes_to_the_pages_in_place(qwen: Loaded) -> None:
    batch = long_batch(qwen.network)
    new = Row(row("new", list(range(1, 90)), 10))
    batch.add(new)
    batch.read({new: 8})
    for _ in range(2):
        batch.step()
    before = addresses(batch)

    batch.step()
    batch.read({new: 64})

    assert addresses(batch) == before


@pytest.mark.parametrize("depth", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_folding_tails_writes_the_bodies_in_place(qwen: Loaded, depth: int) -> None:
    batch = qwen.decoder(depth)
    for name in ("a", "b"):
        enter(batch, row(name, list(range(1, 40)), 500))
    batch.step()
    before, drains = addresses(batch), batch.drains

    while batch.drains == drains:
        batch.step()

    assert addresses(batch) == before


def test_a_step_evaluates_once_and_reads_once(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = qwen.decoder(depth=2)
    for index in range(3):
        enter(decoder, row(str(index), [1 + index, 2, 3], 500, Sampling(0.7, seed=index)))
    for _ in range(3):
        decoder.step()
    calls: list[str] = []
    submit = mx.async_eval

    def counted(*arrays: object) -> None:
        calls.append("submit")
        submit(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    monkeypatch.setattr(mx, "eval", lambda *_: calls.append("wait"))
    reads = decoder.reads

    for _ in range(30):
        decoder.step()

    assert calls == ["submit"] * 30
    assert decoder.reads - reads == 30


def test_rows_that_ask_for_log_probabilities_compile_nothing_new(qwen: Loaded) -> None:
    decoder = qwen.decoder()
    rows = [row(name, [7, 8], 8) for name in "ab"]
    plain = run(decoder, rows)
    traces = decoder.traces
    asking = [
        replace(each, sampling=replace(GREEDY, top_logprobs=asked))
        for each, asked in zip(rows, (0, 3), strict=True)
    ]

    assert run(decoder, asking) == plain

    assert decoder.traces == traces


@pytest.mark.slow
def test_rows_that_join_leave_and_draft_within_a_bucket_compile_nothing_new(
    qwen: Loaded,
) -> None:
    decoder = qwen.decoder(depth=2)
    rng = random.Random(4)
    rows = [
        RowRequest(
            str(i), [rng.randrange(256) for _ in range(5 + i)], 12 + i % 5, GREEDY, depth=i % 3
        )
        for i in range(24)
    ]
    keeper = row("keeper", [9, 9], 400)
    run(decoder, [keeper, *rows[:3]], departures={"keeper": 60})
    traces = decoder.traces

    arrivals = {r.row_id: 6 * i for i, r in enumerate(rows[3:])}
    run(decoder, [keeper, *rows[3:]], arrivals=arrivals, departures={"keeper": 160})

    # Each half is traced twice in a bucket: with the first drafts still to come, and with them.
    assert decoder.traces <= traces + 4


@pytest.mark.parametrize("depth", [0, 2])
def test_no_step_adds_up_nothing(qwen: Loaded, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX on CUDA divides by the length of the axis."""
    lengths: list[int] = []

    def noting(of: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def noted(x: mx.array, *, axis: int, **options: Any) -> mx.array:
            lengths.append(x.shape[axis])
            return of(x, axis=axis, **options)

        return noted

    for name in ("cumsum", "cumprod"):
        monkeypatch.setattr(mx, name, noting(getattr(mx, name)))
    sampling = Sampling(temperature=0.8, filters={"top_p": 0.9}, repetition_penalty=1.2)
    rows = [RowRequest("a", [1, 2, 3], 8, sampling), RowRequest("b", [4, 5], 8, GREEDY)]

    run(RaggedDecoder(as_ragged(qwen.network, drafts=depth > 0), depth), rows)

    assert lengths
    assert all(lengths)


@pytest.mark.slow
def test_no_array_over_the_vocabulary_is_kept_that_the_rules_in_use_do_not_need(
    qwen: Loaded,
) -> None:
    def kept(sampling: Sampling) -> set[str]:
        decoder = qwen.decoder(depth=2)
        enter(decoder, row("a", [1, 2, 3], 50, sampling))
        for _ in range(4):
            decoder.step()
        state = decoder.state
        return {name for name, array in state.items() if array.shape[-1] == 257}

    assert kept(Sampling(0.8, filters={"top_p": 0.9})) == set()
    assert kept(Sampling(0.8, presence_penalty=0.5)) == {"counts"}
