"""Workers that die of jobs: the guilty are found, the innocent finish, nobody waits for ever."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis import Redis

from omlx_worker.queue import lease
from omlx_worker.queue import quarantine as quarantine_module
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.quarantine import QUARANTINE_SECONDS, SUSPECT_DEATHS
from tests.helpers.leases import commit, done, failed, sweep, table, tokens
from tests.helpers.server_time import forward
from tests.helpers.workers import enqueue

pytestmark = pytest.mark.usefixtures("server_time")


@dataclass
class Farm:
    """Workers that run jobs of which some kill, each after so many turns; a turn is 4 seconds.

    Innocent jobs publish a token in each turn, killers none.

    Attributes:
        kills: the chance that a worker is killed from outside in a turn.
    """

    connection: Redis
    deadly: dict[str, int]
    workers: list[LeaseTable]
    now: float = 0.0
    ran: dict[str, int] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    deaths: int = 0
    finished: set[str] = field(default_factory=set)
    convicted: set[str] = field(default_factory=set)
    kills: float = 0.0
    chance: random.Random = field(default_factory=random.Random)

    def turn(self, number: int) -> None:
        """One worker claims, runs what it holds for a while, and may die of it."""
        leases = self.workers[number]
        self.now += 4
        for job in leases.claim(4) or ():
            job.claimed_at = self.now
            self.ran[job.id] = 0
            if job.treatment == "fail":
                self.convicted.add(job.id)
                commit(leases, job, failed(job.id))
        held = leases.jobs()
        self.check_that_suspects_are_alone(held)
        for job in held:
            self.ran[job.id] += 1
        deadly = any(self.ran[job.id] == self.deadly.get(job.id) for job in held)
        if held and (deadly or self.chance.random() < self.kills):
            self.deaths += 1
            self._die(number)
            self.workers[number] = table(self.connection, f"worker-{self.deaths}-{number}")
            return
        going_on = [job for job in held if job.id not in self.deadly]
        leases.append([(job, tokens(job.id, job.streamed + self.ran[job.id])) for job in going_on])
        for job in going_on:
            if self.ran[job.id] >= 2:
                self.finished.add(job.id)
                commit(leases, job, done(job.id, job.streamed + self.ran[job.id]))

    def _die(self, number: int) -> None:
        """One worker dies; the others renew their leases until its own are over."""
        for _ in range(2):
            forward(self.connection, 16)
            for each in self.workers[:number] + self.workers[number + 1 :]:
                each.renew()
        sweep(table(self.connection, "sweeper"))

    def check_that_suspects_are_alone(self, held: list[Claim]) -> None:
        for job in held:
            begun = job.produced_at
            if job.treatment == "alone" and (
                begun is None or self.now < begun + QUARANTINE_SECONDS
            ):
                assert held == [job]


@settings(
    max_examples=settings().max_examples // 5,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    delays=st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 12]), min_size=1, max_size=10),
    turns=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    workers=st.integers(1, 3),
    priorities=st.lists(st.sampled_from(["high", "default", "bulk"]), min_size=10, max_size=10),
    saturated=st.booleans(),
)
def test_innocents_finish_killers_are_convicted_and_no_queue_stands_still(
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
    delays: list[int],
    turns: list[int],
    workers: int,
    priorities: list[str],
    saturated: bool,
) -> None:
    connection.flushall()
    jobs = [enqueue(connection, priority=priorities[n]) for n in range(len(delays))]
    ours = {job.id for job in jobs}
    deadly = {job.id: delay for job, delay in zip(jobs, delays, strict=True) if delay}
    farm = Farm(connection, deadly, [table(connection, f"worker-{n}") for n in range(workers)])
    monkeypatch.setattr(quarantine_module.time, "monotonic", lambda: farm.now)
    order = itertools.chain((turn % workers for turn in turns), itertools.cycle(range(workers)))
    for number in itertools.islice(order, 900):
        if ours <= farm.finished | farm.convicted:
            break
        if saturated:
            enqueue(connection)
        farm.turn(number)
    assert farm.convicted == set(deadly)
    assert ours - set(deadly) <= farm.finished


@pytest.mark.parametrize(("lone_deaths", "spares_innocents"), [(3, True), (1, False)])
def test_frequent_kills_from_outside_convict_the_killer_and_no_innocent(
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
    lone_deaths: int,
    spares_innocents: bool,
) -> None:
    """One lone death, which convicts for comparison, convicts innocents too."""
    monkeypatch.setattr(lease, "FATAL_DEATHS", SUSPECT_DEATHS + lone_deaths)
    convicted_innocents = 0
    for seed in range(10):
        connection.flushall()
        innocents = {enqueue(connection).id for _ in range(30)}
        killer = enqueue(connection).id
        farm = Farm(
            connection,
            {killer: 1},
            [table(connection, f"worker-{n}") for n in range(3)],
            kills=0.2,
            chance=random.Random(seed),
        )
        monkeypatch.setattr(quarantine_module.time, "monotonic", lambda farm=farm: farm.now)
        for number in itertools.islice(itertools.cycle(range(3)), 900):
            if innocents | {killer} <= farm.finished | farm.convicted:
                break
            farm.turn(number)
        assert killer in farm.convicted
        assert farm.finished == innocents - farm.convicted
        convicted_innocents += len(farm.convicted & innocents)
    assert (convicted_innocents == 0) is spares_innocents
