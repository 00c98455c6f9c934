"""How many rows run: as many as the backlog fills."""

from __future__ import annotations

import pytest

from omlx_worker.decode.batch_size import BatchSize
from omlx_worker.engine.rows.interface import FIRST_ROWS


def sized(joined: int, held: int, most: int = 128, *, hurried: bool = False) -> BatchSize:
    """The size of a batch with these rows, of as many as run or wait."""
    size = BatchSize()
    size.limit_to(most)
    size.held = held
    size.step(joined, hurried=hurried)
    return size


@pytest.mark.parametrize(
    ("held", "rows"), [(32, 32), (63, 32), (64, 64), (127, 64), (128, 128), (9000, 128)]
)
def test_as_many_rows_run_as_those_that_run_or_wait_fill(held: int, rows: int) -> None:
    assert sized(32, held).rows == rows


def test_rows_are_counted_only_while_the_first_ones_are_there_and_more_may_run() -> None:
    assert sized(32, 32).asks
    assert not sized(31, 500).asks
    assert sized(31, 500).rows == 32
    assert not sized(32, 500, most=32).asks
    emptied = sized(64, 500)
    emptied.step(10, hurried=False)
    emptied.step(32, hurried=False)
    assert emptied.rows == 32, "what was counted before tells nothing"


def test_bulk_rows_make_no_batch_larger_while_users_wait_for_tokens() -> None:
    size = sized(100, 500, hurried=True)
    assert (size.rows, size.places, size.asks) == (32, 128, False)


@pytest.mark.parametrize("most", [1, 8, 31, 32, 33, 40, 64, 100, 1024])
def test_no_more_rows_run_than_may(most: int) -> None:
    size = sized(most, 10_000, most)
    assert (size.rows, size.places) == (most, most)


def test_rows_of_other_levels_join_as_many_as_the_user_said() -> None:
    size = BatchSize(others=48)
    size.limit_to(128)
    assert (size.rows, size.places) == (FIRST_ROWS, 48)
    size.step(60, hurried=True)
    assert (size.rows, size.places) == (FIRST_ROWS, 64)
