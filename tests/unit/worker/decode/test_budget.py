"""What fits beside what, and what never will."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from omlx_worker.decode.budget import MemoryBudget, Size

GIB = 2**30


def a_mebibyte_a_token(sizes: Sequence[Size], *, alone: bool = False) -> int:
    return sum(to_read + longest for to_read, longest, *_ in sizes) * 2**20


BUDGET = MemoryBudget(limit=4 * GIB, weights=2 * GIB, bytes_for=a_mebibyte_a_token)


def test_rows_fit_up_to_the_limit_and_not_beyond() -> None:
    assert BUDGET.fits([(0, 1024), (24, 1000)])
    assert not BUDGET.fits([(0, 1024), (25, 1000)])
    assert not BUDGET.fits([(0, 1024)], beside=GIB + 1)


def test_what_the_process_takes_outside_the_engine_leaves_less_room() -> None:
    taken = 0
    budget = replace(BUDGET, outside=lambda: taken)
    assert budget.fits([(0, 2048)])
    taken = 1
    assert not budget.fits([(0, 2048)])
    assert budget.objection([(0, 2048)]) is None, "it may have less another time"


def test_a_job_that_can_never_fit_is_told_the_figures() -> None:
    assert BUDGET.objection([(48, 2000), (48, 2000)]) is None
    assert str(BUDGET.objection([(52, 2000)])) == (
        "max_completion_tokens: with its prompt the job may come to 2000 tokens, which take "
        "2.0 GiB; beside the model's 2.0 GiB this worker has 2.0 GiB of 4.0 GiB "
        "(--memory-limit); ask for fewer tokens or raise the limit"
    )
    assert str(BUDGET.objection([(52, 2000, 0, 0, 40)])).endswith(
        "; send fewer or smaller pictures, ask for fewer tokens or raise the limit"
    )


def test_a_job_that_has_to_wait_for_others_is_not_one_that_can_never_fit() -> None:
    def beside_a_gibibyte(sizes: Sequence[Size], *, alone: bool = False) -> int:
        return a_mebibyte_a_token(sizes) + (0 if alone else GIB)

    budget = MemoryBudget(4 * GIB, 2 * GIB, beside_a_gibibyte)

    assert not budget.fits([(48, 2000)])
    assert budget.objection([(48, 2000)]) is None
    assert "which take 2.0 GiB;" in str(budget.objection([(52, 2000)]))
