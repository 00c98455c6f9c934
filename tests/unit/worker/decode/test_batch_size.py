"""How many rows run: what is tried, what is kept, and what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from omlx_worker.decode.batch_size import AGAIN, SETTLED, SOON, BatchSize
from omlx_worker.decode.depth.policies import BatchSpeed
from omlx_worker.engine.rows.interface import FIRST_ROWS

STAIRS = {16: 150, 32: 290, 64: 300}
MATRIX_UNITS = {16: 479, 32: 612, 64: 696, 128: 758}


class Machine:
    """A batch that as many rows join as may, of as many as are there."""

    def __init__(self, speeds: Mapping[int, float], most: int = 128) -> None:
        self.speeds = speeds
        self.timed = {16}
        self.joined = 0
        self.size = BatchSize(self.compare)
        self.size.limit_to(most)

    def compare(self, sizes: Sequence[int]) -> list[BatchSpeed]:
        known = self.timed.issuperset(sizes)
        return [BatchSpeed(size, int(size == 16), self.speeds[size]) for size in sizes if known]

    def run(self, steps: int, held: int = 1000, *, hurried: bool = False) -> list[int]:
        """Take steps while this many bulk rows run or wait; returns the rows that run at each.

        Every fourth step a row of more than may run ends.
        """
        ran = []
        for step in range(steps):
            self.joined -= step % 4 == 0
            self.joined = max(self.joined, min(held, self.size.rows))
            self.size.waiting = held - self.joined
            self.size.step(self.joined, hurried=hurried)
            self.timed.add(self.size.rows)
            ran.append(self.joined)
        return ran


def test_rows_double_while_it_pays_and_as_many_wait() -> None:
    machine = Machine(MATRIX_UNITS)
    ran = machine.run(3 * SETTLED)
    assert sorted({*ran}) == [32, 64, 128]
    assert {*machine.run(20_000)} == {128}


def test_a_size_that_makes_no_more_tokens_is_left_and_tried_again_much_later() -> None:
    machine = Machine({**MATRIX_UNITS, 64: 610})
    assert max(machine.run(2 * SETTLED)) == 64
    machine.run(4 * SETTLED)
    assert {*machine.run(AGAIN // 2)} == {32}
    assert max(machine.run(AGAIN)) == 64
    assert max(machine.run(AGAIN)[4 * SETTLED :]) == 32, "ever more seldom"


def test_rows_that_do_not_fill_a_larger_batch_do_not_begin_one() -> None:
    assert {*Machine(MATRIX_UNITS).run(2000, held=60)} == {32}


def test_a_batch_whose_rows_run_out_takes_no_more_than_at_first_until_many_wait() -> None:
    machine = Machine(MATRIX_UNITS)
    machine.run(2 * SETTLED)
    machine.joined = 40
    machine.run(2 * SETTLED, held=40)
    assert machine.size.rows == 32
    machine.joined = 32
    assert {*machine.run(SOON - 2 * SETTLED)} == {32}
    assert max(machine.run(SOON)) > 32


def test_bulk_rows_make_no_batch_larger_while_users_wait_for_tokens() -> None:
    machine = Machine(MATRIX_UNITS)
    assert {*machine.run(1000, hurried=True)} == {32}
    machine.run(3 * SETTLED)
    machine.run(1, hurried=True)
    assert (machine.size.rows, machine.size.places) == (32, 128)


@pytest.mark.parametrize("most", [1, 8, 31, 32, 33, 40, 64, 100, 1024])
def test_no_more_rows_run_than_may(most: int) -> None:
    machine = Machine(dict.fromkeys((1, 2, 4, 8, 15, 16, *range(17, 1025)), 1.0), most)
    assert max(machine.run(2000)) <= most
    assert machine.size.places <= most


def test_rows_of_other_levels_join_as_many_as_the_user_said() -> None:
    size = BatchSize(lambda _: [], others=48)
    size.limit_to(128)
    assert (size.rows, size.places) == (FIRST_ROWS, 48)
    size.step(60, hurried=True)
    assert (size.rows, size.places) == (FIRST_ROWS, 64)


def test_the_speeds_of_two_sizes_are_told_in_a_sentence() -> None:
    machine = Machine(STAIRS, most=64)
    machine.run(2)
    machine.run(SETTLED, held=20)
    assert machine.size.reason == "32 rows without drafts: 290 tokens/s; 16 with 1 draft: 150"
    machine.run(4 * SETTLED)
    assert machine.size.reason == "64 rows without drafts: 300 tokens/s; 32 without drafts: 290"
    nothing = BatchSize(lambda _: [])
    nothing.step(5, hurried=False)
    assert nothing.reason == ""
