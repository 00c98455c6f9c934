"""Rows and memory: who may join those that are there, and whose cache gives way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import BULK, DEFAULT, HIGH, Row, Size
from tests.helpers.fake_engine import FakeEngine


class Suspending(FakeEngine):
    """Keeps the pages of suspended rows, of five bytes each, and notes which are let go."""

    def __init__(self) -> None:
        super().__init__(max_rows=2)
        self.let_go: list[str] = []

    @property
    def names(self) -> set[str]:
        return {row.row_id for row in self.states}

    def suspend(self, row: Row) -> None:
        super().suspend(row)
        row.kept_bytes = 5

    def remove(self, row: Row) -> None:
        self.let_go.append(row.row_id)
        super().remove(row)


def a_byte_a_token(sizes: Sequence[Size]) -> int:
    """Of the prompts that are still read, and of all rows at their longest."""
    return sum(reading + longest for reading, longest, *_ in sizes)


def row(name: str, level: int, prompt: int, tokens: int) -> list[Row]:
    return [Row(RowRequest(name, [1] * prompt, tokens, Sampling()), level)]


def decoding(
    engine: FakeEngine,
    limit: int,
    driver: DepthDriver | None = None,
    chunks: ChunkSize | None = None,
) -> DecodeLoop:
    budget = MemoryBudget(limit, 0, a_byte_a_token)
    driver, chunks = driver or DepthDriver(FixedPolicy(0)), chunks or ChunkSize(512)
    return DecodeLoop(engine, budget, Counters(), driver=driver, chunks=chunks)


def act_until(decoding: DecodeLoop, condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        decoding.act()
    raise AssertionError("it never came to that")


def test_no_cache_is_let_go_for_a_row_that_would_not_fit_even_then() -> None:
    engine = Suspending()
    worker = decoding(engine, limit=100)
    [bulk] = row("bulk", BULK, prompt=10, tokens=10)
    worker.add([bulk])
    worker.add(row("mid", DEFAULT, prompt=20, tokens=40))
    act_until(worker, lambda: worker.counters.rows == 2 and worker.counters.steps > 3)
    worker.add(row("high", HIGH, prompt=1, tokens=4))
    act_until(worker, lambda: worker.counters.pauses == 1)
    worker.add(row("too-long-now", HIGH, prompt=5, tokens=60))
    act_until(worker, lambda: "too-long-now" in engine.names)
    assert "mid" not in engine.names, "they do not fit together"
    assert engine.let_go == []
    act_until(worker, lambda: not engine.states[bulk].suspended)


def test_the_prompt_that_is_still_read_counts_beside_its_row() -> None:
    engine = Suspending()
    worker = decoding(engine, limit=2035)
    [reading] = row("reading", DEFAULT, prompt=1000, tokens=10)
    worker.add([reading])
    worker.act()
    worker.add(row("high", HIGH, prompt=10, tokens=10))
    act_until(worker, lambda: "high" in engine.names)
    assert reading.left == 0


def test_a_row_that_is_read_for_its_vector_counts_each_token_once() -> None:
    worker = decoding(FakeEngine(vector_size=4), limit=1000)
    worker.add([Row(RowRequest("v", [1] * 10, 0, Sampling(), vector=4))])
    act_until(worker, lambda: worker.act() is None)
    assert worker.counters.prompt_tokens == 10


def test_the_time_of_steps_that_were_traced_is_not_learnt() -> None:
    class Traced(FakeEngine):
        def step(self, depth: int | None = None) -> list[Emission]:
            self.steps += 1
            self.drains += self.steps == 4
            return super().step(depth)

        steps = 0

    told: list[bool] = []

    class Listening(FixedPolicy):
        def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
            told.append(seconds is not None)

    worker = decoding(Traced(), limit=1000, driver=DepthDriver(Listening(0)))
    worker.add(row("a", DEFAULT, prompt=1, tokens=20))
    act_until(worker, lambda: len(told) == 8)
    assert told == [False, True, True, False, False, True, True, True]


def test_traces_and_contests_are_counted_but_for_those_before_rows_came() -> None:
    class Tracing(FakeEngine):
        def step(self, depth: int | None = None) -> list[Emission]:
            self.traces += 2
            self.contests += 1
            return super().step(depth)

    engine = Tracing()
    worker = decoding(engine, limit=1000)
    engine.traces = engine.contests = 40
    worker.add(row("a", DEFAULT, prompt=1, tokens=20))
    act_until(worker, lambda: worker.counters.steps == 3)
    assert (worker.counters.traces, worker.counters.contests) == (6, 3)


def test_pages_are_counted_once_nothing_is_left_to_do(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(max_rows=1)
    worker = decoding(engine, limit=1000)
    worker.add(row("a", DEFAULT, prompt=1, tokens=3))
    engine.wrong_pages = 2
    assert worker.act() is not None
    assert worker.counters.miscounted_pages == 0

    while worker.act() is not None:
        pass
    assert worker.act() is None

    assert worker.counters.miscounted_pages == 2
    [warning] = [each.getMessage() for each in caplog.records]
    assert warning.startswith("2 pages of the caches are miscounted")
