"""Three models on one worker, simulated: jobs in Poisson arrivals, loads of 2, 5 and 20 s.

Beside the turns of a worker stand a worker for each model, which never loads, and one that serves
whoever came first.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from omlx_producer.wire import Priority
from omlx_worker.control.turns import STAY, Turns
from tests.helpers.clock import Clock

LOADS = {"a": 2.0, "b": 5.0, "c": 20.0}
SECONDS = 1.5 * 3600.0
ROWS, STEP = 8, 1.0
"""Rows at the same time, and seconds of a turn of the simulation, in which each has one token."""
TOKENS = 40


@dataclass
class Job:
    model: str
    level: Priority
    came: float
    left: int = TOKENS
    began: float | None = None


def arrivals(share_high: float, load: float) -> list[Job]:
    """Jobs of all models; ``load`` is the share of the time that they would take alone."""
    rng = random.Random(1)
    jobs, now = [], 0.0
    while now < SECONDS:
        now += rng.expovariate(load * ROWS / (TOKENS * STEP))
        level: Priority = "high" if rng.random() < share_high else "bulk"
        jobs.append(Job(rng.choice("abc"), level, now))
    return jobs


@dataclass
class Served:
    """What came of the jobs.

    Attributes:
        longest: wait for the first token, by level, in seconds.
        seconds: until the last job ended.
    """

    tokens: int = 0
    loads: int = 0
    seconds: float = 0.0
    longest: dict[Priority, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


Choose = Callable[[list[Job], list[Job], str | None], str | None]


def serve(
    jobs: list[Job],
    choose: Choose,
    clock: Clock,
    ready: Callable[[float], None] = lambda _: None,
    *,
    in_order: bool = False,
) -> Served:
    """One worker.

    Args:
        choose: says which model to load, given what waits, what runs and what is loaded.
        ready: told of the seconds that a load took.
        in_order: start no job before one of another model that came earlier.
    """
    found = Served()
    coming, waiting, running = deque(jobs), list[Job](), list[Job]()
    loaded: str | None = None
    while coming or waiting or running:
        while coming and coming[0].came <= clock.now:
            waiting.append(coming.popleft())
        target = choose(waiting, running, loaded)
        if target is not None:
            # Rows go on later from where they are.
            waiting, running, loaded = running + waiting, [], target
            clock.now += LOADS[target]
            found.loads += 1
            ready(LOADS[target])
            continue
        others = (job.came for job in waiting if job.model != loaded)
        until = min(others, default=float("inf")) if in_order else float("inf")
        mine = [job for job in waiting if job.model == loaded and job.came < until]
        for job in sorted(mine, key=lambda job: job.level != "high")[: ROWS - len(running)]:
            waiting.remove(job)
            running.append(job)
            if job.began is None:
                job.began = clock.now
                wait = job.began - job.came
                found.longest[job.level] = max(found.longest.get(job.level, 0.0), wait)
        clock.now += STEP
        for job in running:
            job.left -= 1
            found.tokens += 1
        running = [job for job in running if job.left]
    found.seconds = clock.now
    return found


def in_turns(jobs: list[Job]) -> Served:
    clock = Clock()
    turns = Turns(600.0, clock)

    def choose(waiting: list[Job], running: list[Job], loaded: str | None) -> str | None:
        busy = bool(running) or any(job.model == loaded for job in waiting)
        others = {(job.model, job.level) for job in waiting if job.model != loaded}
        return turns.next(sorted(others), busy=busy)

    return serve(jobs, choose, clock, turns.loaded)


def first_come(jobs: list[Job]) -> Served:
    def choose(waiting: list[Job], running: list[Job], loaded: str | None) -> str | None:
        first = min(waiting, key=lambda job: job.came, default=None)
        return first.model if first and not running and first.model != loaded else None

    return serve(jobs, choose, Clock(), in_order=True)


def one_each(jobs: list[Job]) -> Served:
    """Three workers, each of which has its model for good."""
    found = Served()
    for model in LOADS:

        def choose(
            waiting: list[Job],
            running: list[Job],
            loaded: str | None,
            model: str = model,
        ) -> str | None:
            return model if loaded is None else None

        part = serve([job for job in jobs if job.model == model], choose, Clock())
        found.tokens += part.tokens
        found.seconds = max(found.seconds, part.seconds)
        for level, wait in part.longest.items():
            found.longest[level] = max(found.longest.get(level, 0.0), wait)
    return found


@pytest.fixture(params=[(0.0, 0.5), (0.2, 0.5), (0.2, 0.65)], ids=["bulk", "mixed", "full"])
def load(request: pytest.FixtureRequest) -> tuple[float, float]:
    found: tuple[float, float] = request.param
    return found


def test_turns_keep_up_where_first_come_first_served_loads_all_the_time(
    load: tuple[float, float],
) -> None:
    turns, first, each = (policy(arrivals(*load)) for policy in (in_turns, first_come, one_each))
    assert turns.tokens == first.tokens == each.tokens
    # All that came is served soon after the last came, as three workers do.
    assert turns.rate > 0.95 * each.rate
    assert turns.loads < first.loads / 3
    # The two others may go before, each for as long as a model stays, and the load itself.
    others = sum(sorted(max(30.0, STAY * load) + load for load in LOADS.values())[1:])
    assert turns.longest["bulk"] <= 600 + others + LOADS["c"]
    if "high" in turns.longest:
        assert turns.longest["high"] <= 30 + others + LOADS["c"]
