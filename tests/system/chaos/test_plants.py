"""The suite sees what it is for: with each of four faults planted, an invariant is violated.

Every scenario is also run without its plant, and then finds nothing.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from omlx_producer.wire import ChoiceDelta, events_key
from omlx_producer.wire.events import ReadChoice
from tests.helpers.leases import roll_back
from tests.helpers.redis_server import cut_readers
from tests.system.chaos.consumers import Consumer
from tests.system.chaos.invariants import (
    AT_THE_END,
    are_over,
    each_job_ends_once,
    each_job_has_one_result,
    each_job_is_in_one_place,
    nothing_is_held,
    status_of,
    violations,
)
from tests.system.chaos.points import KILL, STOP
from tests.system.chaos.processes import Nursery
from tests.system.chaos.workload import submit
from tests.system.chaos.world import LEASE_SECONDS, World, world


def commit_after_a_pause(place: World, plant: str | None) -> None:
    """A worker is paused just before it commits; another one runs the job meanwhile."""
    paused = place.start_worker(plant=plant, at=[("before-commit", 1, STOP)])
    place.wait_for(lambda: paused.stopped, what="the worker to pause")
    place.start_worker()
    place.wait_for(lambda: status_of(place.connection, place.jobs[0].id) == "finished")
    paused.send(signal.SIGCONT)
    time.sleep(0.3)
    place.dismiss()


def two_sweepers(place: World, plant: str | None) -> None:
    """Two workers find the leases of one that was killed."""
    place.wait_for_fall(place.start_worker(at=[("between-appends", 3, KILL)]))
    time.sleep(LEASE_SECONDS)
    # So slow that the second looks into the queue before the first has ended the job.
    for _ in range(2):
        place.start_worker(plant=plant, step_seconds=0.25, max_rows=1)
    # Both may have come to hold the job; each shall have the time to end it.
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and not (
        are_over(place.connection, place.jobs) and not nothing_is_held(place.connection, [])
    ):
        time.sleep(0.02)
    place.dismiss()


def killed_after_the_pop(place: World, plant: str | None) -> None:
    """A worker is killed between taking a job from its queue and starting it."""
    victim = place.start_worker(plant=plant, at=[("popped" if plant else "after-claim", 1, KILL)])
    place.wait_for_fall(victim)
    if plant is None:
        place.settle(6)


def read_a_stream_that_is_written_again(place: World) -> None:
    """Another worker goes on from a stream that has lost its end, in a larger event."""
    (job,) = place.jobs
    place.attend([Consumer(place.server.url, job, None, lambda: True)])
    victim = place.start_worker(step_seconds=0.02)
    place.wait_for(lambda: place.connection.xlen(events_key(job.id)) > 10)
    victim.kill()
    place.restart_server()
    left = place.connection.xlen(events_key(job.id))
    roll_back(place.connection, events_key(job.id), 3)
    cut_readers(place.connection)
    place.start_worker(step_seconds=0.02)
    place.wait_for(lambda: place.connection.xlen(events_key(job.id)) > 4)
    # Meanwhile more tokens come than the consumer has had, and all of them in one event.
    place.freeze_server(0.03 * left)
    place.settle()


def test_a_consumer_that_takes_an_overlapping_event_whole_is_seen(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(had: ReadChoice, delta: ChoiceDelta) -> ChoiceDelta:
        had.tokens, had.text = delta.start + len(delta.tokens), delta.offset + len(delta.text)
        had.digest = delta.digest
        return delta

    monkeypatch.setattr(ReadChoice, "go_on", whole)
    with world(nursery, tmp_path) as place:
        place.jobs = [submit(place.connection, "hello", max_completion_tokens=80)]
        read_a_stream_that_is_written_again(place)
        (consumer,) = place.consumers
        assert "has had" in "".join(consumer.problems()), place.story()


def test_a_consumer_of_a_stream_that_is_written_again_has_every_token_once(
    nursery: Nursery, tmp_path: Path
) -> None:
    with world(nursery, tmp_path) as place:
        place.jobs = [submit(place.connection, "hello", max_completion_tokens=80)]
        read_a_stream_that_is_written_again(place)
        place.check()


SCENARIOS = {
    "commit_without_fence": (commit_after_a_pause, (each_job_has_one_result,)),
    # The second holder either ends the job a second time, or fails it for what the first one wrote.
    "sweep_without_lock": (two_sweepers, (each_job_has_one_result, each_job_ends_once)),
    # Workers find it again, but until then it is nowhere.
    "claim_by_blpop": (killed_after_the_pop, (each_job_is_in_one_place,)),
}


@pytest.mark.parametrize("plant", SCENARIOS)
def test_a_planted_fault_is_seen(plant: str, nursery: Nursery, tmp_path: Path) -> None:
    run, checks = SCENARIOS[plant]
    with world(nursery, tmp_path) as place:
        place.jobs = [submit(place.connection, "hello", max_completion_tokens=16)]
        run(place, plant)
        assert violations(place.connection, place.jobs, checks), place.story()


@pytest.mark.parametrize("plant", SCENARIOS)
def test_without_the_plant_nothing_is_found(plant: str, nursery: Nursery, tmp_path: Path) -> None:
    run, _ = SCENARIOS[plant]
    with world(nursery, tmp_path) as place:
        place.jobs = [submit(place.connection, "hello", max_completion_tokens=16)]
        run(place, None)
        assert not violations(place.connection, place.jobs, AT_THE_END), place.story()
