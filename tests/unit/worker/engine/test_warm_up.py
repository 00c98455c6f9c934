"""What rows would wait for if they met it first is done while nobody waits."""

from __future__ import annotations

import itertools

import pytest

from omlx_producer.wire.request import MAX_DRAFT_DEPTH
from omlx_worker.engine import warm_up
from omlx_worker.engine.ragged.step import MOST_COMMITS, MOST_FORWARDS
from omlx_worker.engine.rows.interface import depths_of
from omlx_worker.engine.rows.request import Sampling
from omlx_worker.engine.warm_up import SAMPLINGS, WarmUp, shapes
from omlx_worker.settings import MOST_OWN_DRAFTS, USUAL_MOST_ROWS
from tests.helpers.decoding import Loaded, enter, row, run

SAMPLED = Sampling(temperature=0.8, filters={"top_k": 20}, seed=3)


def warmed(qwen: Loaded, max_rows: int) -> WarmUp:
    warm = WarmUp(qwen.decoder(depth=1), max_rows)
    warm.limit = 1 << 40
    return warm


def test_the_first_job_needs_one_row_in_each_way_to_sample_and_its_windows() -> None:
    first = [shape for shape in shapes(6) if shape.is_first]
    assert [(shape.rows, shape.length) for shape in first[:3]] == [(1, 256)] * 3
    assert [shape.length for shape in first[3:]] == [16, 32, 48, 64, 96, 128]
    assert shapes(6)[: len(first)] == first
    rows = [shape.rows for shape in shapes(6) if shape.sampling == SAMPLINGS[0]]
    assert rows == [1, 2, 4, 6] * 3


def test_rows_of_the_list_wait_for_no_trace_and_say_what_they_say_without_a_warm_up(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "LENGTHS", (256, 512))
    warm = warmed(qwen, max_rows=2)
    parts = warm.first_parts
    for part in range(1, parts + 1):
        assert warm.next(first=True) == (part < parts), "it is known how many there are"
    decoder, prompts = warm._decoder, ([5] * 20, [6] * 30)
    traces = decoder.traces
    assert traces
    assert run(decoder, [row("a", prompts[0], 12)]) == {"a": qwen.greedy(prompts[0], 12)}
    assert decoder.traces == traces
    while warm.next():
        pass
    traces = decoder.traces
    wanted = {name: qwen.greedy(prompt, 12) for name, prompt in zip("ab", prompts, strict=True)}
    assert run(decoder, [row(*each, 12) for each in zip("ab", prompts, strict=True)]) == wanted
    long = [7 * at % 250 for at in range(300)]
    assert run(decoder, [row("a", long, 12)], chunk=512) == {"a": qwen.greedy(long, 12)}
    sampled = [row(name, prompts[0], 12, SAMPLED) for name in "ab"]
    assert run(decoder, sampled) == run(qwen.decoder(depth=1), sampled)
    assert decoder.traces == traces


def test_no_change_of_depth_waits_for_a_trace(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "LENGTHS", (256,))
    decoder = qwen.decoder(depth=1, lookup=4)
    warm = WarmUp(decoder, 1)
    warm.limit = 1 << 40
    while warm.next():
        pass
    traces = decoder.traces
    for sampling in SAMPLINGS:
        entered = enter(decoder, row("a", [5] * 16, 1000, sampling))
        for pair in itertools.permutations(depths_of(decoder.max_depth, decoder.own_depth), 2):
            for depth in pair:
                decoder.step(depth)
        decoder.leave(entered)
    assert decoder.traces == traces


def test_all_of_the_list_is_kept() -> None:
    steps = {(shape.rows, shape.length) for shape in shapes(USUAL_MOST_ROWS) if shape.sampling}
    layouts = len(steps) * len(depths_of(MAX_DRAFT_DEPTH, MOST_OWN_DRAFTS))
    assert layouts <= MOST_FORWARDS
    assert layouts * len(SAMPLINGS) <= MOST_COMMITS


def test_more_rows_than_a_batch_begins_with_come_to_the_list_once_there_were_as_many(
    qwen: Loaded,
) -> None:
    warm, usual = WarmUp(qwen.decoder(), 128), shapes(32)
    for slots, listed in ((1, 32), (32, 32), (64, 64), (64, 64), (32, 64)):
        warm.met(slots)
        assert sorted(warm._left, key=str) == sorted(shapes(listed), key=str)
    assert warm._left[: len(usual)] == usual
    small = WarmUp(qwen.decoder(), 40)
    small.met(64)
    assert max(shape.rows for shape in small._left) == 40


def test_rows_that_come_drop_those_of_the_warm_up(qwen: Loaded) -> None:
    warm = warmed(qwen, max_rows=4)
    for _ in range(5):
        warm.next()
    assert warm._decoder.slots
    warm.stop()
    assert not warm._decoder.slots
    prompt = [5] * 20
    assert run(warm._decoder, [row("a", prompt, 12)]) == {"a": qwen.greedy(prompt, 12)}
    assert warm.next(), "what was begun is begun anew"


def test_shapes_that_do_not_fit_and_failures_end_no_worker(
    qwen: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warm = warmed(qwen, max_rows=4)
    warm.limit = 0
    while warm.next():
        pass
    assert warm._decoder.traces == 0
    warm = warmed(qwen, max_rows=4)
    monkeypatch.setattr(warm._decoder, "step", lambda _: 1 / 0)
    while warm.next():
        pass
    assert "the warm-up ends" in caplog.text
    assert not warm._decoder.slots
