"""How prompts are read beside rows that decode: the worker's way, a constant, and half of it."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence

import pytest

from omlx_worker.decode import scheduler, window_cost
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.engine.rows.interface import LONGEST_CHUNK
from omlx_worker.engine.rows.row import Row
from tests.simulation.reading import (
    FILES,
    FOLLOWED,
    MACHINES,
    Felt,
    Workload,
    chats,
    conversations,
    file,
    long_beside,
    one_by_one,
    read,
)

SEEDS = (1, 2)
EVERYTHING = (*FILES, *FOLLOWED)


class Constant(ChunkSize):
    """Chunks of one size."""

    def whole(self, context: int, hurried: bool) -> int:
        return self._most


def felt(workload: Workload, chunks: Callable[[int], ChunkSize], most: int) -> list[Felt]:
    every = itertools.product(MACHINES.values(), SEEDS)
    return [read(machine, workload, seed, chunks(most)) for machine, seed in every]


@functools.cache
def usual(workload: Workload) -> list[Felt]:
    """What users of each machine feel, the way the worker does it."""
    return felt(workload, ChunkSize, LONGEST_CHUNK)


def ratio(others: Sequence[Felt], workload: Workload, of: Callable[[Felt], float]) -> float:
    """How many times as much users of other ways feel."""
    pairs = zip(others, usual(workload), strict=True)
    return statistics.geometric_mean([of(other) / of(own) for other, own in pairs])


@pytest.mark.parametrize("tokens", [64, 128, 256, 512, 1024, 2048])
def test_no_constant_size_of_chunks_is_as_good_for_all_machines(tokens: int) -> None:
    ratios = [
        ratio(felt(each, Constant, tokens), each, lambda other: other.cost) for each in EVERYTHING
    ]
    assert statistics.geometric_mean(ratios) >= 1.05


def test_no_window_comes_near_the_five_seconds_after_which_metal_kills_it() -> None:
    assert max(max(each.windows) for workload in EVERYTHING for each in usual(workload)) < 4


def oldest_only(rows: Sequence[Row]) -> list[Row]:
    return [min(rows, key=lambda row: row.rank)] * 2 if rows else []


def nothing_fixed(windows: Sequence[tuple[float, int]]) -> tuple[float, float]:
    return 0.0, statistics.median(seconds / tokens for seconds, tokens in windows)


@pytest.mark.parametrize(
    ("module", "part", "without", "workload", "of", "least"),
    [
        (scheduler, "_turns", oldest_only, long_beside, lambda each: each.first, 1.5),
        (window_cost, "_line", nothing_fixed, chats, lambda each: each.cost, 1.2),
        (window_cost, "_span", lambda _: 0, conversations, lambda each: each.gap, 1.1),
    ],
    ids=["turns go to short prompts", "a fixed cost", "ranges of contexts"],
)
def test_each_part_pays(
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    part: str,
    without: object,
    workload: Workload,
    of: Callable[[Felt], float],
    least: float,
) -> None:
    usual(workload)
    monkeypatch.setattr(module, part, without)
    assert ratio(felt(workload, ChunkSize, LONGEST_CHUNK), workload, of) >= least


@pytest.mark.parametrize("machine", MACHINES)
def test_jobs_that_come_one_after_another_are_read_together(machine: str) -> None:
    for seed in SEEDS:
        chunks = ChunkSize(LONGEST_CHUNK)
        for _ in range(3):
            windows = len(read(MACHINES[machine], one_by_one, seed, chunks).windows)
        assert windows <= 14


def test_bulk_rows_that_gather_are_read_sooner_where_an_empty_window_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds() -> float:
        return sum(read(MACHINES["H200"], file, seed, ChunkSize(2048)).seconds for seed in SEEDS)

    gathered = seconds()
    monkeypatch.setattr(scheduler, "GATHERING", 0)
    assert seconds() >= 1.05 * gathered
