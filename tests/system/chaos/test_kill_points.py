"""kill -9 at every named point: the job is where its status says, and the next worker ends it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random

import pytest

from tests.system.chaos.invariants import status_of
from tests.system.chaos.points import CUT, KILL, STOP
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import submit, submit_some
from tests.system.chaos.world import LEASE_SECONDS, World, world


def fill(place: World) -> None:
    """Six jobs of all kinds."""
    place.jobs = [
        submit(place.connection, "first", max_completion_tokens=12),
        submit(place.connection, "bulk", priority="bulk", max_completion_tokens=25),
        submit(place.connection, "two", n=2, seed=7, max_completion_tokens=20),
        submit(place.connection, "a longer prompt than one chunk", priority="high"),
        submit(place.connection, "second"),
        submit(place.connection, "third"),
    ]


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("claim-sent", 1),
        ("after-claim", 1),
        ("prefill", 1),
        ("prefill", 5),
        ("append-sent", 1),
        ("append-sent", 9),
        ("between-appends", 1),
        ("between-appends", 7),
        ("renew-sent", 1),
        ("before-commit", 1),
        ("before-commit", 2),
        ("commit-sent", 1),
        ("commit-sent", 3),
        ("after-commit", 1),
    ],
)
def test_a_worker_killed_at(point: str, count: int, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        victim = place.start_worker(at=[(point, count, KILL)], step_seconds=0.02)
        place.wait_for_fall(victim)
        assert victim.code == -signal.SIGKILL, place.story()
        place.check_at_rest()
        place.settle()
        place.check()


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("claim-sent", 1),
        ("append-sent", 3),
        ("renew-sent", 1),
        ("commit-sent", 1),
        ("commit-sent", 2),
    ],
)
def test_a_worker_whose_connection_is_cut_at(
    point: str, count: int, nursery: Nursery, tmp_path: Path
) -> None:
    """Nobody knows then whether the server has carried the call out; the worker makes it again."""
    with world(nursery, tmp_path) as place:
        fill(place)
        place.start_worker(at=[(point, count, CUT)], step_seconds=0.02)
        place.settle()
        place.check()
        assert len(place.workers) == 1


@pytest.mark.parametrize("point", ["sweep-sent", "after-sweep"])
def test_a_worker_killed_while_it_sweeps(point: str, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        place.wait_for_fall(place.start_worker(at=[("between-appends", 3, KILL)]))
        time.sleep(LEASE_SECONDS)
        victim = place.start_worker(at=[(point, 1, KILL)])
        place.wait_for_fall(victim)
        assert victim.code == -signal.SIGKILL, place.story()
        place.check_at_rest()
        place.settle()
        place.check()


def test_a_worker_killed_while_it_gives_its_jobs_back(nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        place.jobs = [
            submit(place.connection, f"p{number}", max_completion_tokens=300) for number in range(4)
        ]
        victim = place.start_worker(at=[("give-back-sent", 1, KILL)])
        place.wait_for(lambda: all(_is_started(place, number) for number in range(4)))
        victim.send(signal.SIGTERM)
        place.wait_for_fall(victim)
        assert victim.code == -signal.SIGKILL, place.story()
        place.check_at_rest()
        place.settle()
        place.check()


def _is_started(place: World, number: int) -> bool:
    return status_of(place.connection, place.jobs[number].id) == "started"


@pytest.mark.parametrize(
    "point",
    ["before-commit", "after-claim", "prefill", "between-appends", "commit-sent"],
)
def test_a_worker_paused_past_its_lease_at(point: str, nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        fill(place)
        paused = place.start_worker(at=[(point, 1, STOP)])
        place.wait_for(lambda: paused.stopped, what="the worker to pause")
        other = place.start_worker()
        place.wait_for(lambda: _all_over(place), what="the other worker to finish all jobs")
        paused.send(signal.SIGCONT)
        time.sleep(0.3)
        assert paused.alive
        assert other.alive
        place.dismiss()
        place.check()


def _all_over(place: World) -> bool:
    return all(status_of(place.connection, job.id) == "finished" for job in place.jobs)


def test_two_workers_that_die_in_turn_for_thirty_jobs(nursery: Nursery, tmp_path: Path) -> None:
    with world(nursery, tmp_path) as place:
        place.jobs = submit_some(place.connection, Random(5), 30)
        for count in (3, 5, 8):
            pair = [
                place.start_worker(at=[("between-appends", count + offset, KILL)])
                for offset in range(2)
            ]
            for worker in pair:
                place.wait_for_fall(worker)
        place.settle(60)
        place.check()
