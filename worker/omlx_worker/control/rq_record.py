"""The worker as RQ's tools see it: its record, commands and registries."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from random import SystemRandom, random
from typing import Any
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.rate_limit import RateLimitRegistry
from rq.serializers import JSONSerializer
from rq.utils import now, utcparse
from rq.worker import WorkerStatus
from rq.worker_registration import clean_worker_registry, register

from omlx_producer.outage import passes
from omlx_producer.signals import StopSignals
from omlx_producer.wire.keys import wake_channel, workers_key
from omlx_worker.messages import MainMailbox, Ring, StopJob
from omlx_worker.processes import lives
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.worker")

BEAT_SECONDS = 15.0
# This many workers look after a ring, on average. After one ring in 400, more than ten do.
FEW = 4
# A worker is silent for this long only if it has died or Redis was away.
TAKEOVER_SECONDS = 3 * BEAT_SECONDS


class NameTaken(ValueError):
    """Another worker has this name. The message is one sentence."""


class RecordedWorker(Worker):
    """RQ's worker without work horses: one record for many jobs.

    Args:
        models: their aliases; producers ring on their channels.
        is_child: whether the record is that of the parent, under the same name. Then only the state
            and the executions are written here, and the parent alone is told to drain.
    """

    def __init__(
        self,
        queues: list[str],
        *,
        connection: Redis,
        name: str | None,
        models: Sequence[str],
        is_child: bool = False,
    ) -> None:
        super().__init__(
            queues,
            name=name or unique_name(),
            connection=connection,
            serializer=JSONSerializer,
            # A description holds the prompt.
            log_job_description=False,
        )
        # The workers of each model, by its channel.
        self._workers_keys = {wake_channel(model): workers_key(model) for model in models}
        self._workers = dict.fromkeys(self._workers_keys, 1)
        # Of the main thread. Commands arrive on RQ's pub/sub thread.
        self._mailbox: MainMailbox = SimpleQueue()
        self._signals = StopSignals(lambda: self._mailbox.put(Ring()), drains=self._drains)
        self.is_child = is_child
        self._appeared = False
        self._shown: tuple[str, list[str]] | None = None
        self._beat_at = float("-inf")

    def _set_connection(self, connection: Redis) -> Redis:
        """RQ raises the socket timeout for its blocking pops. This worker has none."""
        return connection

    # Commands

    def subscribe(self) -> None:
        """Listen for RQ's commands and for producers."""
        pubsub: Any = self.connection.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        pubsub.subscribe(
            **{
                self.pubsub_channel_name: self.handle_payload,
                **dict.fromkeys(self._workers_keys, self._hear),
            }
        )
        self.pubsub: Any = pubsub
        self.pubsub_thread: Any = pubsub.run_in_thread(
            sleep_time=60, daemon=True, exception_handler=self._pubsub_exception_handler
        )

    def _hear(self, message: dict[str, Any]) -> None:
        """A producer has rung for a number of jobs: about `FEW` of all workers look for each."""
        jobs = 1
        with suppress(ValueError):
            jobs = int(message["data"])
        workers = self._workers[message["channel"].decode()]
        if random() * workers < FEW * max(1, jobs):
            self._mailbox.put(Ring())

    def unsubscribe(self) -> None:
        """End the thread first: in RQ's order it may wait again and miss the end."""
        if self.pubsub_thread is not None:
            self.pubsub_thread.stop()
            try:
                self.pubsub.unsubscribe()
            except (RedisError, OSError, ValueError) as error:
                # The thread is reconnecting; redis-py guards a connection against other threads.
                log.info("the subscription did not end cleanly: %s", error)
            self.pubsub_thread.join(timeout=1)

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Pass an RQ command to the main thread."""
        try:
            payload = json.loads(message["data"])
            command = payload["command"]
        except (ValueError, KeyError, TypeError, RecursionError):
            log.warning("ignoring an unreadable command: %r", message.get("data"))
            return
        if command in ("stop-job", "stop-execution"):
            self._mailbox.put(StopJob(str(payload.get("job_id"))))
        elif command == "shutdown":
            if not self.is_child:
                self.drain()
        else:
            log.info("ignoring the command %r: this worker has no work horse", command)

    def _drains(self) -> bool:
        """Whether there is anything to end in order; without it the first signal ends at once."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take no new jobs, and end once those that run are finished. From any thread.

        Unlike a second signal, a second call does not end it at once.
        """
        if not self._signals.asked:
            self.stop()

    def stop(self) -> None:
        """As a signal does, from any thread: drain; at the second call, stop at once."""
        self._signals.receive(signal.SIGTERM)

    def _pubsub_exception_handler(self, exc: Exception, _: Any, thread: Any) -> None:
        """RQ's own handler ends the thread if a server does not answer in time."""
        if not passes(exc):
            log.error("no longer listening for commands: %s", exc)
            thread.stop()
            return
        time.sleep(SystemRandom().uniform(0.5, 1.5))

    # The record

    def appear(self) -> None:
        """Write the record and listen for commands, once."""
        if not self._appeared:
            self.register_birth()
            self.subscribe()
            self._appeared = True

    def disappear(self) -> None:
        """Listen for nothing any more, and tell of the end."""
        self.unsubscribe()
        if self.birth_date is not None:
            self.register_death()  # type: ignore[no-untyped-call]

    def register_birth(self) -> None:
        """Write the record. Replaces the record of a killed worker, which RQ keeps for minutes.

        Raises:
            NameTaken: if a worker with this name lives, or may live.
        """
        if self.is_child:
            return
        self.connection.transaction(self._retire_predecessor, self.key)
        super().register_birth()  # type: ignore[no-untyped-call]
        # Producers find a model by its queues before it is announced.
        self.connection.sadd(Queue.redis_queues_keys, *(queue.key for queue in self.queues))

    def require_free_name(self) -> None:
        """Look before the model is loaded, which takes time; `register_birth` looks again.

        Errors of Redis are left to the work, which tells their remedies.

        Raises:
            NameTaken: see `register_birth`.
        """
        if not self.is_child:
            with suppress(RedisError):
                self._has_predecessor(self.connection)

    def _retire_predecessor(self, pipeline: Any) -> None:
        """Delete the record of a dead worker.

        The record is watched: of two workers that start at once, only one succeeds.
        """
        # A watched pipeline runs commands at once.
        died = self._has_predecessor(pipeline)
        pipeline.multi()
        if died:
            log.warning("worker %s has died; taking over its name", self.name)
            pipeline.delete(self.key)

    def _has_predecessor(self, client: Any) -> bool:
        """Whether a dead worker has left a record under this name. A living one is refused."""
        values = client.hmget(self.key, "hostname", "pid", "last_heartbeat", "death")
        host, pid, seen, death = (None if value is None else value.decode() for value in values)
        if seen is None or death is not None:
            return False
        silent = (now() - utcparse(seen)).total_seconds()
        gone = host == self.hostname and pid is not None and not lives(int(pid))
        if silent > TAKEOVER_SECONDS or gone:
            return True
        raise NameTaken(
            f"name: got {self.name!r}, the name of a worker that was alive {silent:.0f} s ago "
            f"(process {pid} on {host}); give another, leave it out, or wait until it has been "
            f"silent for {TAKEOVER_SECONDS:.0f} s"
        )

    def show(self, leases: LeaseTable, paused: bool) -> None:
        """Write the state and the executions if they have changed."""
        executions = [f"{claim.id}:{claim.execution}" for claim in leases.jobs()]
        idle = WorkerStatus.SUSPENDED if paused else WorkerStatus.IDLE
        shown = (WorkerStatus.BUSY if executions else idle, executions)
        if shown == self._shown:
            return
        with self.connection.pipeline() as pipeline:
            self.set_state(shown[0], pipeline=pipeline)
            pipeline.delete(self.executions_key)
            if executions:
                pipeline.sadd(self.executions_key, *executions)
                pipeline.expire(self.executions_key, self.worker_ttl)
            # If Redis has lost the record, `set_state` makes one without an expiry, which would
            # outlive a killed worker.
            pipeline.expire(self.key, self.worker_ttl + 60)
            pipeline.execute()
        self._shown = shown

    def beat(self) -> bool:
        """Send a heartbeat and run RQ's maintenance, if due; returns whether they were."""
        if time.monotonic() - self._beat_at < BEAT_SECONDS:
            return False
        with self.connection.pipeline() as pipeline:
            for key in self._workers_keys.values():
                pipeline.hlen(key)
            if not self.is_child:
                self.heartbeat(pipeline=pipeline)
            answers = pipeline.execute()
        self._workers = dict(zip(self._workers_keys, answers, strict=False))
        if not self.is_child and answers[len(self._workers_keys)]:
            # The record was gone: Redis was away for too long, or has lost its data.
            self.connection.hset(self.key, mapping=self.serialize())
            register(self)
            self._shown = None
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
        self._beat_at = time.monotonic()
        return True

    def clean_registries(self) -> None:
        """RQ's maintenance without registries of jobs: `queue.upkeep` cleans them, a bounded number
        of entries a call, and puts abandoned jobs back, which RQ would fail."""
        for queue in self.queues:
            if not queue.acquire_maintenance_lock():
                continue
            clean_worker_registry(queue)
            queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        for limit in RateLimitRegistry.all(self.connection):
            limit.cleanup()
        self.last_cleaned_at = now()  # type: ignore[assignment]


def unique_name() -> str:
    """A name that no worker had before: RQ refuses a killed worker's name for minutes."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host}-{os.getpid()}-{uuid4().hex[:6]}"
