"""Prompts that the worker's own scheduler reads between steps, on machines of numbers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.rows.interface import FIRST_ROWS
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import BULK, DEFAULT, Row
from tests.helpers.scheduling import follow
from tests.simulation.engine import NOISE, OUTLIERS
from tests.simulation.tables import ROWS_STEP, CostTable, h200, measured_rows, shared

IN_FLIGHT = 0.9
"""Of a step: it was dispatched just before, and a chunk waits for its end."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What reads and decodes.

    Attributes:
        step: seconds of a step.
        window: seconds of a window by its tokens, padding included, and the context before it.
    """

    step: CostTable
    window: Callable[[int, int], float]

    def job_seconds(self, prompt: int, tokens: int) -> float:
        """What a job takes of a batch of 16 rows."""
        return self.window(prompt, 0) + tokens * self.step(16, 0, prompt, 0.0) / 16


def _as_steps(name: str) -> Machine:
    """A window costs what a step of as many rows does, and attention."""
    table = measured_rows(name)
    return Machine(table, lambda n, context: table(n, 0, 0, 0.0) * (1 + context / 30_000))


MACHINES: dict[str, Machine] = {
    **{name: _as_steps(name) for name in ROWS_STEP},
    "H200": Machine(h200, lambda n, context: 0.030 + n * (1.5e-5 + 1e-9 * context)),
    "two cores": Machine(shared, lambda n, context: 0.003 + n * (1.25e-3 + 1e-8 * context)),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A row to be.

    Attributes:
        arrival: seconds.
        prompt, tokens: how many it has, and generates.
        cached: tokens of the prompt that are kept from before.
    """

    arrival: float
    prompt: int
    tokens: int
    level: int = DEFAULT
    cached: int = 0


def file(rng: random.Random, machine: Machine) -> list[Job]:
    """A file of short prompts."""
    return [Job(0.0, rng.randint(30, 250), rng.randint(32, 160), BULK) for _ in range(80)]


def long_file(rng: random.Random, machine: Machine) -> list[Job]:
    """A file of long prompts with short answers."""
    return [Job(0.0, rng.randint(800, 3000), rng.randint(20, 80), BULK) for _ in range(32)]


def burst(rng: random.Random, machine: Machine) -> list[Job]:
    """Many short prompts at once."""
    return [Job(0.0, rng.randint(20, 300), rng.randint(40, 120)) for _ in range(FIRST_ROWS)]


def one_by_one(rng: random.Random, machine: Machine) -> list[Job]:
    """Short prompts that one client sends one after another."""
    return [Job(0.003 * place, rng.randint(7, 22), 40) for place in range(FIRST_ROWS)]


def chats(rng: random.Random, machine: Machine) -> list[Job]:
    """Prompts of 20 to 2,560 tokens at random."""
    lengths = [round(20 * 2 ** rng.uniform(0, 7)) for _ in range(60)]
    times = _at_random(rng, machine.job_seconds(700, 80), len(lengths))
    return [Job(time, n, rng.randint(40, 120)) for time, n in zip(times, lengths, strict=True)]


def conversations(rng: random.Random, machine: Machine) -> list[Job]:
    """Short prompts, and next turns of long conversations, of which the beginning is kept."""
    made = []
    for time in _at_random(rng, machine.job_seconds(500, 60), 60):
        cached = rng.choice((0, rng.randint(5000, 50_000)))
        prompt = cached + rng.randint(50, 900)
        made.append(Job(time, prompt, rng.randint(20, 100), cached=cached))
    return made


def long_beside(rng: random.Random, machine: Machine) -> list[Job]:
    """Two long prompts, and short ones now and then, while a few rows decode."""
    step = machine.step(4, 0, 500, 0.0)
    made = [Job(0.0, rng.randint(20, 60), 700) for _ in range(4)]
    made += [Job(50 * step, 8000, 40), Job(400 * step, 4000, 40)]
    return made + [Job(rng.uniform(50, 500) * step, rng.randint(10, 100), 20) for _ in range(8)]


def beside_a_file(rng: random.Random, machine: Machine) -> list[Job]:
    """A user who asks now and then, beside a file."""
    made = file(rng, machine)
    seconds = sum(machine.job_seconds(job.prompt, job.tokens) for job in made)
    return made + [
        Job(rng.uniform(0, seconds), rng.randint(20, 400), rng.randint(20, 60)) for _ in range(8)
    ]


def _at_random(rng: random.Random, seconds: float, count: int) -> list[float]:
    """When jobs come that take ``seconds`` each and fill more than half of the time."""
    time, times = 0.0, []
    for _ in range(count):
        time += rng.expovariate(0.6 / seconds)
        times.append(time)
    return times


Workload = Callable[[random.Random, Machine], list[Job]]
FILES: tuple[Workload, ...] = (file, long_file)
FOLLOWED: tuple[Workload, ...] = (burst, chats, conversations, long_beside, beside_a_file)


@dataclass(slots=True)
class Felt:
    """What users feel, in seconds.

    Attributes:
        firsts, wholes: from the arrival to the first and the last token, of each row.
        gaps: the longest between two tokens, of each row that a user follows.
        windows: what each window took.
    """

    seconds: float = 0.0
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    gaps: dict[str, float] = field(default_factory=dict)
    windows: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return statistics.fmean(self.firsts)

    @property
    def gap(self) -> float:
        return statistics.fmean(self.gaps.values())

    @property
    def cost(self) -> float:
        """One number: of a file its seconds, else the mean of first token, last token and gap."""
        if not self.gaps:
            return self.seconds
        return statistics.geometric_mean([self.first, statistics.fmean(self.wholes), self.gap])


def read(machine: Machine, workload: Workload, seed: int, chunks: ChunkSize) -> Felt:
    """Run a workload's jobs to their end."""
    jobs = workload(random.Random(seed), machine)
    waiting = sorted(enumerate(jobs), key=lambda pair: -pair[1].arrival)
    rng, felt, now, in_flight = random.Random(seed), Felt(), 0.0, 0.0
    held = {str(number): job.cached for number, job in enumerate(jobs)}
    said: dict[str, float] = {}
    scheduler = Scheduler(FIRST_ROWS, chunks, MemoryBudget(0, 0, lambda _: 0), clock=lambda: now)
    while waiting or scheduler.rows:
        while waiting and waiting[-1][1].arrival <= now:
            number, job = waiting.pop()
            request = RowRequest(str(number), [number] * (job.prompt + 1), job.tokens, Sampling())
            scheduler.add(Row(request, job.level))
        act, told = scheduler.next(), 0.0
        if act.chunk:
            seconds = machine.window(act.chunk.computed, act.chunk.context)
            felt.windows.append(seconds)
            now += seconds
            told = _told(rng, seconds) + (in_flight if act.rows else 0.0)
        elif act.rows and not act.row:
            slots = 1 << (len(act.rows) - 1).bit_length()
            seconds = machine.step(slots, 0, max(len(row.tokens) for row in act.rows), 0.0)
            now, in_flight = now + seconds, IN_FLIGHT * seconds
            for row in act.rows:
                name, job = row.row_id, jobs[int(row.row_id)]
                row.tokens.append(0)
                if name not in said:
                    felt.firsts.append(now - job.arrival)
                elif row.level < BULK:
                    felt.gaps[name] = max(felt.gaps.get(name, 0.0), now - said[name])
                said[name] = now
                if len(row.tokens) == job.prompt + 1 + job.tokens:
                    felt.wholes.append(now - job.arrival)
                    scheduler.remove(row)
        elif not act.row:
            now = waiting[-1][1].arrival
        follow(scheduler, act, told, held)
    felt.seconds = now
    return felt


def _told(rng: random.Random, seconds: float) -> float:
    """What a window seems to take."""
    if rng.random() < OUTLIERS:
        return seconds * rng.choice((3.0, 20.0))
    return seconds * max(rng.gauss(1.0, NOISE), 0.5)
