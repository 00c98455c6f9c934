"""Random disturbances. One seed is one schedule, as far as processes can be made to obey one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from redis.exceptions import RedisError

from omlx_producer import Producer
from tests.system.chaos.bulk import DetachedBatch, FileRun, Submissions
from tests.system.chaos.consumers import Consumer
from tests.system.chaos.points import CUT, CUTTABLE, KILL, POINTS
from tests.system.chaos.workload import FINAL, Accepted, submit_some
from tests.system.chaos.world import World

LONGEST_PAUSE = 0.2


class Schedule:
    """A workload, a fleet, and what befalls them.

    Args:
        folder: of the files of clients.
        may_lose: whether the server may come back without its last writes.
    """

    def __init__(self, seed: int, place: World, folder: Path, *, may_lose: bool) -> None:
        self._random = Random(seed)
        self._place = place
        self._folder = folder
        # A cursor is not exact once a server has lost writes.
        self._leaving = [None] if may_lose else [None, 3, 10]
        self._bulk: list[FileRun | DetachedBatch] = []
        self._submissions: list[Submissions] = []
        self._faults: list[Callable[[], None]] = [
            self._pause_worker,
            self._restart_server,
            self._freeze_server,
            self._fill_memory,
            self._refuse_writes,
            self._cut_connections,
            self._end_worker,
            self._cancel_job,
            self._submit_more,
            self._kill_client,
            self._kill_client,
            self._lose_writes if may_lose else self._restart_server,
        ]

    def run(self) -> None:
        place, random = self._place, self._random
        place.jobs = submit_some(place.connection, random, random.randint(3, 8))
        self._attend(place.jobs)
        self._send_clients()
        for _ in range(random.randint(1, 2)):
            self._start_worker()
        for _ in range(random.randint(2, 5)):
            self._wait()
            random.choice(self._faults)()
            self._replace_the_fallen()
        # Every schedule kills, whatever else it does.
        self._wait()
        self._kill_worker()
        place.settle()
        place.jobs += [job for submissions in self._submissions for job in submissions.jobs]
        place.check([problem for bulk in self._bulk for problem in bulk.check(place.connection)])

    def _wait(self) -> None:
        time.sleep(self._random.uniform(0, LONGEST_PAUSE))

    # Clients and consumers

    def _send_clients(self) -> None:
        place, random = self._place, self._random
        if random.random() < 0.5:
            self._bulk.append(FileRun(self._folder / "rows.jsonl", random))
        if random.random() < 0.5:
            path = self._folder / "batch.jsonl"
            self._bulk.append(DetachedBatch(path, random, place.connection))
        if random.random() < 0.5:
            submissions = Submissions(self._folder / "submissions.jsonl", random)
            self._submissions.append(submissions)
        for client in (*self._bulk, *self._submissions):
            if not isinstance(client, DetachedBatch):
                place.send_client(*client.args)

    def _attend(self, jobs: list[Accepted]) -> None:
        place, random = self._place, self._random
        place.attend(
            [
                Consumer(
                    place.server.url, job, random.choice(self._leaving), lambda: place.has_lost
                )
                for job in jobs
                if random.random() < 0.6
            ]
        )

    def _kill_client(self) -> None:
        if not self._place.errands:
            return
        errand = self._random.choice(self._place.errands)
        self._place.note(f"the client {errand} is killed")
        errand.kill()
        self._wait()
        errand.tend()

    # Workers

    def _start_worker(self) -> None:
        random, at = self._random, []
        if random.random() < 0.6:
            at.append((random.choice(POINTS), random.randint(1, 6), KILL))
        if random.random() < 0.4:
            at.append((random.choice(CUTTABLE), random.randint(1, 4), CUT))
        self._place.start_worker(at=at, max_rows=random.choice([1, 2, 4, 8]))

    def _replace_the_fallen(self) -> None:
        if len(self._place.standing()) < self._random.randint(1, 2):
            self._start_worker()

    def _anyone(self) -> Any:
        standing = self._place.standing()
        return self._random.choice(standing) if standing else self._place.start_worker()

    def _kill_worker(self) -> None:
        worker = self._anyone()
        self._place.note(f"worker {worker.pid} is killed")
        worker.kill()

    def _pause_worker(self) -> None:
        worker = self._anyone()
        seconds = self._random.uniform(0.2, 2.5) * self._place.lease_seconds
        self._place.note(f"worker {worker.pid} is paused for {seconds:.2f} s")
        worker.send(signal.SIGSTOP)
        self._place.start_worker()
        time.sleep(seconds)
        worker.send(signal.SIGCONT)

    def _end_worker(self) -> None:
        worker = self._anyone()
        self._place.note(f"worker {worker.pid} is told to end")
        worker.send(signal.SIGTERM)

    # The server

    def _lose_writes(self) -> None:
        random = self._random
        self._place.lose_writes(random.uniform(0, 1), random.uniform(0, 0.5))

    def _restart_server(self) -> None:
        self._place.restart_server(self._random.uniform(0, 1.5) * self._place.lease_seconds)

    def _freeze_server(self) -> None:
        self._place.freeze_server(self._random.uniform(0.1, 1.5) * self._place.lease_seconds)

    def _fill_memory(self) -> None:
        self._place.fill_memory(self._random.uniform(0.1, 1.5) * self._place.lease_seconds)

    def _refuse_writes(self) -> None:
        self._place.refuse_writes(self._random.uniform(0.1, 1.5) * self._place.lease_seconds)

    def _cut_connections(self) -> None:
        for _ in range(self._random.randint(1, 5)):
            cut = self._place.connection.client_kill_filter(_type="normal", skipme=True)
            cut += self._place.connection.client_kill_filter(_type="pubsub")
            self._place.note(f"{cut} connections are cut")
            time.sleep(0.02)

    # Producers

    def _cancel_job(self) -> None:
        job = self._random.choice(self._place.jobs)
        self._place.note(f"job {job.id} is cancelled")
        job.endings = set(FINAL - {"failed"})
        Producer(self._place.connection).cancel(job.id)

    def _submit_more(self) -> None:
        try:
            more = submit_some(self._place.connection, self._random, 3)
            self._place.jobs += more
            self._attend(more)
        except RedisError as error:
            self._place.note(f"no jobs are submitted: {error}")
