"""Which queue is claimed from next."""

from __future__ import annotations

import itertools

from omlx_worker.queue.claim import Claim
from omlx_worker.queue.order import ClaimOrder, ClaimPlan
from tests.helpers.clock import Clock

QUEUES = ("high", "default", "bulk")


numbers = itertools.count()


def job(queue: str) -> Claim:
    number = next(numbers)
    return Claim(f"j{number}", f"omlx-{number}", queue, 0.0, 0, b"", None, False)


def test_all_queues_are_claimed_from_the_best_first() -> None:
    assert ClaimOrder(QUEUES).plan(4, 0, []) == ClaimPlan(QUEUES, 4)


def test_a_full_batch_claims_nothing_unless_bulk_rows_can_make_place() -> None:
    order = ClaimOrder(QUEUES)
    assert order.plan(0, 0, []) is None
    assert order.plan(-1, 0, []) is None
    assert order.plan(0, 3, []) == ClaimPlan(("high",), 3)


def test_a_full_batch_takes_turns_with_its_own_queue_better_ones_and_overdue_ones() -> None:
    clock = Clock()
    order = ClaimOrder(QUEUES, clock)
    assert order.plan(-3, 0, [], 0) == ClaimPlan(("high",), 1)
    assert order.plan(0, 8, [], 1) == ClaimPlan(("high", "default"), 1)
    clock.now = 30
    assert order.plan(0, 0, [], 0) == ClaimPlan(("default", "high"), 1, overdue=True)


def test_a_queue_that_never_had_a_chance_is_served_once_its_patience_is_over() -> None:
    clock = Clock()
    order = ClaimOrder(QUEUES, clock)
    served = []
    for _ in range(100):
        clock.now += 1
        claim = order.plan(1, 0, [])
        assert claim is not None
        # Every queue is full: the first one gives a job.
        order.claimed(claim, [job(claim.queues[0])])
        if claim.overdue:
            served.append((clock.now, claim.queues[0]))
    assert served[0][0] == 30
    for queue in ("default", "bulk"):
        times = [0.0] + [at for at, name in served if name == queue]
        assert max(b - a for a, b in itertools.pairwise(times)) <= 32


def test_an_overdue_queue_found_empty_does_not_keep_another_from_its_chance() -> None:
    clock = Clock()
    order = ClaimOrder(QUEUES, clock)
    clock.now = 30
    first = order.plan(1, 0, [])
    assert first == ClaimPlan(("default", "high", "bulk"), 1, overdue=True)
    order.claimed(first, [job("high")])
    assert order.plan(1, 0, []) == ClaimPlan(("bulk", "high", "default"), 1, overdue=True)


def test_a_queue_found_empty_has_had_its_chance() -> None:
    clock = Clock()
    order = ClaimOrder(QUEUES, clock)
    for _ in range(100):
        clock.now += 1
        claim = order.plan(2, 0, [])
        assert claim is not None
        assert not claim.overdue
        order.claimed(claim, [job("high")])


def test_a_job_that_does_not_fit_holds_up_its_queue_and_those_behind_until_a_job_leaves() -> None:
    order = ClaimOrder(QUEUES)
    held = [job("default"), job("default")]
    order.blocked(job("default"), False, held)
    assert order.plan(4, 0, held) == ClaimPlan(("high",), 4)
    assert order.plan(4, 0, [*held, job("high")]) == ClaimPlan(("high",), 4)
    assert order.plan(4, 0, held[1:]) == ClaimPlan(QUEUES, 4)


def test_everything_waits_for_an_overdue_job_that_does_not_fit() -> None:
    order = ClaimOrder(QUEUES)
    held = [job("high")]
    order.blocked(job("bulk"), True, held)
    assert order.plan(4, 0, held) is None
    assert order.plan(0, 2, held) is None
    assert order.plan(4, 0, []) == ClaimPlan(QUEUES, 4)


def test_a_job_of_the_best_queue_that_does_not_fit_holds_up_everything() -> None:
    order = ClaimOrder(QUEUES)
    held = [job("high")]
    order.blocked(job("high"), False, held)
    assert order.plan(4, 0, held) is None
