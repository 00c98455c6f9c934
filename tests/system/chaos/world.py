"""A server, workers that are replaced when they fall, and jobs: what schedules disturb."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from omlx_worker.queue import lua as scripts
from tests.helpers.redis_server import RedisServer, redis_server
from tests.system.chaos.invariants import AT_REST, AT_THE_END, are_over, violations
from tests.system.chaos.processes import ChaosWorker, Nursery
from tests.system.chaos.workload import Accepted

SCRIPTS = ("claim", "append", "commit", "renew", "give_back", "sweep")
LEASE_SECONDS = 1.0
TICK = 0.02


class World:
    """Everything that one schedule runs in.

    Attributes:
        jobs: those that Redis has acknowledged.
        history: what was done, for the message of a test that fails.
    """

    def __init__(self, server: RedisServer, nursery: Nursery, log: Path) -> None:
        self.server = server
        self.jobs: list[Accepted] = []
        self.history: list[str] = []
        self.connection = Redis.from_url(server.url)
        self.workers: list[ChaosWorker] = []
        self._nursery = nursery
        self._log = log
        self._began = time.monotonic()
        for name in SCRIPTS:
            # So that the first answer to a call is not that its script is unknown.
            self.connection.script_load(scripts.source(name))

    def note(self, text: str) -> None:
        self.history.append(f"{time.monotonic() - self._began:6.2f} s: {text}")

    # Workers

    def start_worker(self, **orders: Any) -> ChaosWorker:
        orders = {"lease_seconds": LEASE_SECONDS, "log": str(self._log), **orders}
        worker = self._nursery.spawn(url=self.server.url, **orders)
        self.workers.append(worker)
        self.note(f"worker {worker.pid} starts {orders.get('at', '')}")
        return worker

    def standing(self) -> list[ChaosWorker]:
        return [worker for worker in self.workers if worker.alive]

    def wait_for(self, condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what or condition}\n{self.story()}"
            time.sleep(TICK)

    def wait_for_fall(self, worker: ChaosWorker) -> None:
        self.wait_for(lambda: not worker.alive, what=f"the end of worker {worker.pid}")
        self.note(f"worker {worker.pid} has ended with {worker.code}")

    # The server

    def restart_server(self, away: float = 0.0) -> None:
        """Kill it and start it again, with all that it has written to its file.

        With everysec a server may acknowledge for up to 2 s what it has not yet written, while the
        disk is busy with an earlier part.
        """
        self.wait_for(lambda: not self.connection.info("persistence")["aof_buffer_length"])
        self.server.kill()
        self.note(f"the server is killed for {away:.2f} s")
        time.sleep(away)
        self.server.start()

    def freeze_server(self, seconds: float) -> None:
        assert self.server.process is not None
        self.note(f"the server is frozen for {seconds:.2f} s")
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.server.process.send_signal(signal.SIGCONT)

    def fill_memory(self, seconds: float) -> None:
        self.note(f"the server is out of memory for {seconds:.2f} s")
        self.connection.config_set("maxmemory", 1)
        time.sleep(seconds)
        self.connection.config_set("maxmemory", 0)

    def refuse_writes(self, seconds: float) -> None:
        self.note(f"the server is read-only for {seconds:.2f} s")
        self.connection.replicaof("127.0.0.1", "1")
        time.sleep(seconds)
        self.connection.replicaof("NO", "ONE")

    # The end

    def settle(self, seconds: float = 40.0, **orders: Any) -> None:
        """Let workers, replaced as they fall, finish all jobs; then end them in good order."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._unexplained():
            if not self.standing():
                self.start_worker(**orders)
            with contextlib.suppress(RedisError):
                if are_over(self.connection, self.jobs):
                    break
            time.sleep(TICK)
        self.dismiss()

    def dismiss(self) -> None:
        for worker in self.standing():
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        self.wait_for(lambda: not self.standing(), what="the workers to end")

    def check_at_rest(self) -> None:
        """After a fall, while nobody works."""
        self._check(violations(self.connection, self.jobs, AT_REST))

    def check(self) -> None:
        found = violations(self.connection, self.jobs, AT_THE_END)
        self._check([*self._unexplained(), *found])

    def _unexplained(self) -> list[str]:
        return [
            f"worker {worker.pid} ended by itself with {worker.code}"
            for worker in self.workers
            if not worker.alive and not worker.explained
        ]

    def _check(self, problems: list[str]) -> None:
        assert not problems, "\n".join([*problems, self.story()])

    def story(self) -> str:
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join([*self.history, "the workers say:", *log.splitlines()[-60:]])


@contextlib.contextmanager
def world(nursery: Nursery, folder: Path, fsync: str = "everysec") -> Iterator[World]:
    with redis_server("--appendonly", "yes", "--appendfsync", fsync) as server:
        made = World(server, nursery, folder / f"workers-{os.getpid()}.log")
        try:
            yield made
        finally:
            for worker in made.standing():
                worker.kill()
            made.connection.close()
