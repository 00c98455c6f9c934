"""A server, workers that are replaced when they fall, clients, and jobs: what schedules disturb."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from omlx_producer import lua as scripts
from omlx_producer.wire.keys import BATCHES_KEY
from tests.helpers.redis_server import RedisServer, redis_server
from tests.system.chaos.consumers import Consumer
from tests.system.chaos.invariants import (
    AT_REST,
    AT_THE_END,
    are_over,
    nothing_is_held,
    violations,
)
from tests.system.chaos.processes import ChaosWorker, Errand, Nursery
from tests.system.chaos.workload import Accepted

SCRIPTS = ("claim", "append", "commit", "renew", "give_back", "sweep")
LEASE_SECONDS = 1.0
TICK = 0.02


class World:
    """Everything that one schedule runs in.

    Attributes:
        jobs: those that Redis has acknowledged.
        history: what was done, for the message of a test that fails.
        has_lost: whether the server has lost what it had acknowledged.
        errands: clients that run until they are done.
        consumers: readers of jobs.
    """

    def __init__(
        self, server: RedisServer, nursery: Nursery, log: Path, lease_seconds: float
    ) -> None:
        self.server = server
        self.lease_seconds = lease_seconds
        self.has_lost = False
        self.errands: list[Errand] = []
        self.consumers: list[Consumer] = []
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
        orders = {"lease_seconds": self.lease_seconds, "log": str(self._log), **orders}
        worker = self._nursery.spawn(url=self.server.url, **orders)
        self.workers.append(worker)
        self.note(f"worker {worker.pid} starts {orders.get('at', '')}")
        return worker

    def send_client(self, *args: str) -> None:
        """Let a client do something in the folder of the log, as often as it takes."""
        orders = {"url": self.server.url, "log": str(self._log), "folder": str(self._log.parent)}
        self.errands.append(Errand(self._nursery, args=args, **orders))
        self.errands[-1].tend()

    def start_client(self, **orders: Any) -> ChaosWorker:
        """A client process that nobody starts again."""
        return self._nursery.spawn_client(url=self.server.url, **orders)

    def attend(self, consumers: list[Consumer]) -> None:
        self.consumers += consumers
        for consumer in consumers:
            consumer.start()

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
        self._wait_for_the_file()
        self.server.kill()
        self.note(f"the server is killed for {away:.2f} s")
        time.sleep(away)
        self.server.start()

    def _wait_for_the_file(self) -> None:
        self.wait_for(lambda: not self.connection.info("persistence")["aof_buffer_length"])

    def lose_writes(self, seconds: float, away: float = 0.0) -> None:
        """Kill the server. It comes back without the writes of its last seconds.

        So it is with everysec if the machine falls, or if the disk is slow. All clients then submit
        again what they have submitted.
        """
        self._wait_for_the_file()
        (file,) = (self.server.folder / "appendonlydir").glob("*.incr.aof")
        durable = file.stat().st_size
        time.sleep(seconds)
        self.server.kill()
        lost = file.stat().st_size - durable
        os.truncate(file, durable)
        self.note(f"the server is killed for {away:.2f} s and has lost {lost} bytes")
        self.has_lost = True
        time.sleep(away)
        self.server.start()
        for job in self.jobs:
            if job.again is not None:
                job.again(self.connection)
        for errand in self.errands:
            errand.do_again()

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
        """Let workers, replaced as they fall, finish all work; then end them in good order."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._unexplained():
            if not self.standing():
                self.start_worker(**orders)
            for errand in self.errands:
                errand.tend()
            with contextlib.suppress(RedisError):
                if self._is_settled():
                    break
            time.sleep(TICK)
        for consumer in self.consumers:
            consumer.join(max(0.0, min(5.0, deadline - time.monotonic())))
        self.dismiss()

    def _is_settled(self) -> bool:
        return (
            all(errand.done for errand in self.errands)
            and are_over(self.connection, self.jobs)
            and not nothing_is_held(self.connection, self.jobs)
            and not self.connection.exists(BATCHES_KEY)
        )

    def dismiss(self) -> None:
        for worker in self.standing():
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        self.wait_for(lambda: not self.standing(), what="the workers to end")

    def check_at_rest(self) -> None:
        """After a fall, while nobody works."""
        self._check(violations(self.connection, self.jobs, AT_REST))

    def check(self, problems: Sequence[str] = ()) -> None:
        found = [*problems]
        found += violations(self.connection, self.jobs, AT_THE_END)
        found += [f"{errand} is not done" for errand in self.errands if not errand.done]
        found += [problem for consumer in self.consumers for problem in consumer.problems()]
        self._check([*self._unexplained(), *found])

    def _unexplained(self) -> list[str]:
        return [
            f"worker {worker.pid} ended by itself with {worker.code}"
            for worker in self.workers
            if not worker.alive and not worker.explained
        ] + [errand.wrong for errand in self.errands if errand.wrong]

    def _check(self, problems: list[str]) -> None:
        assert not problems, "\n".join([*problems, self.story()])

    def story(self) -> str:
        log = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join([*self.history, "the processes say:", *log.splitlines()[-60:]])


@contextlib.contextmanager
def world(
    nursery: Nursery,
    folder: Path,
    fsync: str = "everysec",
    lease_seconds: float = LEASE_SECONDS,
) -> Iterator[World]:
    with redis_server("--appendonly", "yes", "--appendfsync", fsync) as server:
        made = World(server, nursery, folder / "processes.log", lease_seconds)
        try:
            yield made
        finally:
            for consumer in made.consumers:
                consumer.dismiss()
            for process in (*made.standing(), *made.errands):
                process.kill()
            made.connection.close()
