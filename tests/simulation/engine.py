"""An engine of numbers: it costs what a table says and accepts drafts by chance.

It keeps the pipeline of the real one: a step verifies what the step before it drafted, cut or
padded to the depth that it drafts itself, and the policy hears of a step one step late.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from omlx_worker.decode.batch_size import BatchSize
from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.policies import DepthPolicy
from omlx_worker.decode.depth.step_times import cell_of
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import FIRST_ROWS
from tests.simulation.tables import CostTable
from tests.simulation.workloads import SimulatedJob

CHUNK = 1.5
"""Seconds of a prompt chunk as a share of a step, as `chunk_size` aims at."""

CHUNK_OVERHEAD = 0.2
"""Price of a chunk however short it is, in plain steps of one row."""

SHRINK_AFTER = 32
"""Steps with half the slots empty before there are fewer, as in the real batch."""

RESUME = 0.25
"""Price of drafting again after plain steps, in steps."""

NOISE, OUTLIERS = 0.04, 0.01
"""Spread of the times reported, and the share of them that is far off."""

COMPILE = 2.0
"""Seconds that the first step of a new shape seems to take. They are reported but not counted:
every policy pays for the shapes that it uses once in the life of a worker."""


@dataclass(slots=True)
class _Row:
    job: SimulatedJob
    left: int
    context: int
    chance: random.Random
    luck: list[float] = field(default_factory=list)
    drafts: int = 0

    def accept(self) -> int:
        """How many of the drafts made for it are accepted.

        Every token of a job has its own luck, the same whatever the policy, so that policies are
        not compared by how lucky they were.
        """
        first = self.job.tokens - self.left
        while len(self.luck) < first + self.drafts:
            self.luck.append(self.chance.random())
        accepted = 0
        while accepted < self.drafts and self.luck[first + accepted] < self.job.rates[accepted]:
            accepted += 1
        return accepted


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What a step truly was.

    Attributes:
        seconds: without noise.
        tokens: generated and wanted.
        expected: tokens that it would generate on average, drafting as deep as it verified.
    """

    rows: int
    depth: int
    seconds: float
    tokens: int
    expected: float


class Outcome(NamedTuple):
    """What a policy hears of a step; see `DepthPolicy.observe`."""

    emissions: Sequence[Emission]
    depth: int
    seconds: float | None


@dataclass(slots=True)
class Run:
    """A simulation's steps and sums.

    Attributes:
        sizes: rows up to which others join, at each step.
    """

    steps: list[SimulatedStep] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    reading_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole run: steps and prompts."""
        return self.reading_seconds + sum(step.seconds for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def changes(self) -> int:
        """Changes of depth from one step to the next, probes included."""
        depths = [step.depth for step in self.steps]
        return sum(a != b for a, b in itertools.pairwise(depths))


class SimulatedEngine:
    """Rows in slots, stepping."""

    def __init__(self, table: CostTable, seed: int, noise: float = NOISE) -> None:
        self._table = table
        self._seed = seed
        self._rng = random.Random(seed)
        self._noise = noise
        self._rows: dict[str, _Row] = {}
        self._has_drafts = False
        self._slack = 0
        self._landing: Outcome | None = None
        self._drafted = 0
        self._joined = False
        self.generated = 0
        self._shapes: set[tuple[int, ...]] = set()
        self.slots = 0
        self.plain_seconds = table(1, 0, 0, 0.0)
        self.last_seconds = self.plain_seconds

    @property
    def rows(self) -> list[RowView]:
        return [RowView(name, row.job.limit, row.context) for name, row in self._rows.items()]

    def add(self, job: SimulatedJob) -> None:
        chance = random.Random(f"{self._seed} {job.row_id}")
        self._rows[job.row_id] = _Row(job, job.tokens, job.prompt, chance)
        self.slots = max(self.slots, _slots_for(len(self._rows)))
        self._joined = True

    def disturb(self) -> None:
        """The next step's time says nothing."""
        self._joined = True

    def step(self, depths: Mapping[str, int]) -> tuple[SimulatedStep, Outcome | None]:
        """Run a step that drafts so deep; returns it, and the report of the one before it."""
        self._compact()
        drafted = max(depths.values(), default=0)
        window = drafted if self._has_drafts else 0
        assert all(k <= self._rows[row_id].job.limit for row_id, k in depths.items())
        context = max(row.context for row in self._rows.values())
        verify = self._table(self.slots, window, context, self.generated)
        seconds = (verify + self._table(self.slots, drafted, context, self.generated)) / 2
        if drafted and not window:
            seconds += RESUME * verify
        self.last_seconds = seconds
        rows, tokens, expected, judged = len(self._rows), 0, 0.0, 0
        emissions = []
        for name, row in list(self._rows.items()):
            row.drafts = min(row.drafts, window)
            judged = max(judged, row.drafts)
            accepted = row.accept()
            emissions.append(Emission(name, [], "", drafted=row.drafts, accepted=accepted))
            expected += row.job.expected(row.drafts)
            tokens += min(1 + accepted, row.left)
            row.left -= 1 + accepted
            row.context += 1 + accepted
            row.drafts = depths.get(name, 0)
            if row.left <= 0:
                del self._rows[name]
        self._has_drafts = bool(drafted and self._rows)
        self.generated += tokens
        shape = (self.slots, window, drafted, *cell_of(0, context))
        time = self._reported(seconds, shape)
        landed, self._landing = self._landing, None
        if landed and self._drafted != drafted:
            # What a change of depth takes is in the time of the step before, as in `DepthDriver`.
            landed = landed._replace(seconds=None)
        self._drafted = drafted
        if judged != drafted:
            time = None
        self._landing = Outcome(emissions, judged, time)
        return SimulatedStep(rows, window, seconds, tokens, expected), landed

    def _reported(self, seconds: float, shape: tuple[int, ...]) -> float | None:
        joined, self._joined = self._joined, False
        if shape not in self._shapes:
            self._shapes.add(shape)
            return seconds + COMPILE
        if joined:
            return None
        if self._rng.random() < OUTLIERS:
            return seconds * self._rng.choice((0.1, 3.0, 20.0))
        return seconds * max(self._rng.gauss(1.0, self._noise), 0.5)

    def _compact(self) -> None:
        excess = self.slots // max(1, len(self._rows)) - 1
        self._slack = self._slack + excess if excess else 0
        if self._slack >= SHRINK_AFTER:
            self.slots = _slots_for(len(self._rows))
            self._slack = 0


def _slots_for(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()


class Oracle:
    """Knows the table and every row's chances, and drafts what is best for the next step."""

    def __init__(self, table: CostTable, jobs: Sequence[SimulatedJob], max_depth: int) -> None:
        self._table = table
        self._jobs = {job.row_id: job for job in jobs}
        self._max_depth = max_depth

    def best(self, rows: Sequence[RowView], slots: int, clock: float) -> tuple[int, float]:
        """The best depth, and its tokens per second."""
        context = max(row.context for row in rows)
        jobs = [self._jobs[row.row_id] for row in rows]
        speeds = [
            sum(job.expected(depth) for job in jobs) / self._table(slots, depth, context, clock)
            for depth in range(max(job.limit for job in jobs) + 1)
            if depth <= self._max_depth
        ]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return best, speeds[best]


class Prompts:
    """Prompts read a chunk at a time between steps, one row after another, as `Scheduler` does.

    Args:
        token: seconds to read a prompt token, as a share of a plain step of one row; 0 lets rows
            join without being read.
        size: says how many rows run.
    """

    def __init__(self, engine: SimulatedEngine, token: float, size: BatchSize) -> None:
        self._engine = engine
        self._token = token
        self._size = size
        self._left = 0.0
        self._waiting: deque[SimulatedJob] = deque()
        self._job: SimulatedJob | None = None

    @property
    def idle(self) -> bool:
        return self._job is None and not self._waiting

    @property
    def _free(self) -> int:
        return self._size.rows - self._joined

    @property
    def _joined(self) -> int:
        return len(self._engine.rows) + (self._job is not None)

    @property
    def _chunk(self) -> float:
        """Prompt tokens that fit the time of a chunk."""
        seconds = CHUNK * self._engine.last_seconds - CHUNK_OVERHEAD * self._engine.plain_seconds
        return max(seconds / (self._token * self._engine.plain_seconds), 8.0)

    def add(self, job: SimulatedJob) -> None:
        self._waiting.append(job)

    def look(self) -> None:
        """Let `BatchSize` see the rows of the next step, all of which are bulk rows."""
        self._size.held = self._joined + len(self._waiting)
        self._size.step(self._joined, hurried=False)

    def read(self) -> float:
        """Read what is due before the next step; returns the seconds that it takes."""
        seconds = 0.0
        while not self.idle:
            if self._job is None:
                if self._free <= 0:
                    break
                self._job = self._waiting.popleft()
                self._left = float(self._job.prompt)
            if self._token:
                chunk = min(self._chunk, self._left)
                self._left -= chunk
                seconds += (CHUNK_OVERHEAD + chunk * self._token) * self._engine.plain_seconds
                self._engine.disturb()
            else:
                self._left = 0.0
            if self._left <= 0:
                self._engine.add(self._job)
                self._job = None
            if self._token and self._engine.rows:
                break
        return seconds


def simulate(
    policy: DepthPolicy | Oracle,
    table: CostTable,
    jobs: Sequence[SimulatedJob],
    *,
    seed: int = 0,
    max_rows: int = FIRST_ROWS,
    max_steps: int = 10**6,
    noise: float = NOISE,
    read: float = 0.0,
    size: BatchSize | None = None,
) -> Run:
    """Run jobs to their end, or for `max_steps` steps.

    Args:
        size: says how many rows run; None for the worker's own way.
        read: see `Prompts`.
    """
    engine, run = SimulatedEngine(table, seed, noise), Run()
    size = size or BatchSize()
    size.limit_to(max_rows)
    prompts = Prompts(engine, read, size)
    waiting = sorted(jobs, key=lambda job: job.arrival, reverse=True)
    clock = 0.0
    while len(run.steps) < max_steps:
        if not engine.rows and prompts.idle and waiting:
            clock = max(clock, waiting[-1].arrival)
        while waiting and waiting[-1].arrival <= clock:
            prompts.add(waiting.pop())
        run.reading_seconds += prompts.read()
        views = engine.rows
        if not views:
            break
        if isinstance(policy, Oracle):
            depth, _ = policy.best(views, engine.slots, engine.generated)
        else:
            depth, _ = policy.choose(views, engine.slots)
        prompts.look()
        step, landed = engine.step({view.row_id: min(view.limit, depth) for view in views})
        if landed and not isinstance(policy, Oracle):
            policy.observe(*landed)
        run.steps.append(step)
        run.sizes.append(size.rows)
        clock += step.tokens
    return run
