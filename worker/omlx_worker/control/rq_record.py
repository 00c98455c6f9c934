"""What RQ's tools see of the worker: its record, its commands, its registries."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from random import SystemRandom
from types import FrameType
from typing import Any
from uuid import uuid4

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import RedisError
from rq import Queue, Worker
from rq.job import Job
from rq.registry import DeferredJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import now, utcparse
from rq.worker import WorkerStatus
from rq.worker_registration import clean_worker_registry, register

from omlx_producer.outage import passes
from omlx_worker.messages import MainMailbox, Ring, StopJob
from omlx_worker.queue.claim import ClaimedJob
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.lua import load
from omlx_worker.queue.quarantine import RUN_FIELDS

log = logging.getLogger("omlx_worker.worker")

BEAT_SECONDS = 15.0
# A worker is not heard of for so long only when it has died, or Redis was away.
SILENT_SECONDS = 3 * BEAT_SECONDS
# As often as RQ's scheduler looks, whose scores are whole seconds.
SCHEDULE_SECONDS = 1.0
MOST_DUE = 1000


class NameTaken(ValueError):
    """Another worker has the name that was asked for. The message is one sentence."""


class RecordedWorker(Worker):
    """RQ's worker without its work horses: one record that stands for many jobs.

    Args:
        bell: a channel on which any message means that jobs may have arrived.
        mailbox: where commands go; they come on RQ's pub/sub thread.
    """

    def __init__(
        self,
        queues: list[str],
        *,
        connection: Redis,
        name: str | None,
        bell: str,
        mailbox: MainMailbox,
    ) -> None:
        super().__init__(
            queues, name=name or unique_name(), connection=connection, serializer=JSONSerializer
        )
        # Called with the pipeline in which RQ's handlers end a job.
        self.on_ending: Callable[[Pipeline], None] | None = None
        # Called with that pipeline before its transaction begins; see `rq_endings`.
        self.fence: Callable[[Pipeline], None] | None = None
        self._bell = bell
        self._mailbox = mailbox
        self._shown: tuple[str, str | None] | None = None
        self._beat_at = self._scheduled_at = float("-inf")
        self._schedule = load(connection, "schedule")

    def queue_of(self, claim: ClaimedJob) -> Queue:
        return next(queue for queue in self.queues if queue.name == claim.queue)

    def _set_connection(self, connection: Redis) -> Redis:
        """RQ raises the socket timeout to outlast its blocking pops; there are none here."""
        return connection

    # Commands

    def subscribe(self) -> None:
        """Listen for RQ's commands and for producers that ring."""
        if self.pubsub_thread is not None:
            return
        pubsub: Any = self.connection.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        pubsub.subscribe(
            **{
                self.pubsub_channel_name: self.handle_payload,
                self._bell: lambda _: self._mailbox.put(Ring()),
            }
        )
        self.pubsub: Any = pubsub
        self.pubsub_thread: Any = pubsub.run_in_thread(
            sleep_time=60, daemon=True, exception_handler=self._pubsub_exception_handler
        )

    def unsubscribe(self) -> None:
        """In the other order than RQ's, whose thread may go back to waiting and miss its end."""
        if self.pubsub_thread is not None:
            self.pubsub_thread.stop()
            try:
                self.pubsub.unsubscribe()
            except (RedisError, OSError, ValueError) as error:
                # The thread is just connecting anew, and redis-py guards a connection for one.
                log.info("the subscription could not be ended in good order: %s", error)
            self.pubsub_thread.join(timeout=1)

    def handle_payload(self, message: dict[str, Any]) -> None:
        """Pass an RQ command on to the main thread."""
        try:
            payload = json.loads(message["data"])
            command = payload["command"]
        except (ValueError, KeyError, TypeError):
            log.warning("ignoring a command that can not be read: %r", message.get("data"))
            return
        if command == "stop-job":
            self._mailbox.put(StopJob(str(payload.get("job_id"))))
        elif command == "shutdown":
            self.request_stop(signal.SIGINT, None)
        else:
            log.info("ignoring the command %r: this worker has no work horse", command)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        """RQ's own ends the thread for good when a server does not answer in time."""
        if not passes(exc):
            log.error("no more commands are heard: %s", exc)
            raise exc
        time.sleep(SystemRandom().uniform(0.5, 1.5))

    # The record

    def register_birth(self) -> None:
        """Also under the name of a worker that was killed, whose record RQ keeps for minutes.

        Raises:
            NameTaken: if a worker of this name lives, or may.
        """
        self.connection.transaction(self._retire_predecessor, self.key)
        super().register_birth()  # type: ignore[no-untyped-call]

    def _retire_predecessor(self, pipeline: Pipeline) -> None:
        """Delete the record of a dead worker. Two that start at once must not both succeed: the
        record is watched, and the later one finds that of the earlier."""
        names = ("hostname", "pid", "last_heartbeat", "death")
        host, pid, seen, death = (
            value.decode() if value is not None else None for value in self._read(pipeline, names)
        )
        pipeline.multi()
        if seen is None or death is not None:
            return
        silent = (now() - utcparse(seen)).total_seconds()
        gone = host == self.hostname and pid is not None and not _lives(int(pid))
        if silent > SILENT_SECONDS or gone:
            log.warning("the worker named %s has died; taking over its name", self.name)
            pipeline.delete(self.key)
            return
        raise NameTaken(
            f"name: got {self.name!r}, the name of a worker that showed a sign of life "
            f"{silent:.0f} s ago (process {pid} on {host}); give another, leave it out, or wait "
            f"until it has been silent for {SILENT_SECONDS:.0f} s"
        )

    def _read(self, pipeline: Any, names: tuple[str, ...]) -> list[bytes | None]:
        # A watched pipeline answers at once.
        values: list[bytes | None] = pipeline.hmget(self.key, *names)
        return values

    def show(self, leases: LeaseTable, suspended: bool) -> None:
        """Write state and current job when they have changed; the oldest job stands for all."""
        jobs = leases.jobs()
        idle = WorkerStatus.SUSPENDED if suspended else WorkerStatus.IDLE
        shown = (WorkerStatus.BUSY, jobs[0].id) if jobs else (idle, None)
        if shown == self._shown:
            return
        with self.connection.pipeline() as pipeline:
            self.set_state(shown[0], pipeline=pipeline)
            self.set_current_job_id(shown[1], pipeline=pipeline)
            pipeline.execute()
        self._shown = shown

    def beat(self) -> bool:
        """Show a sign of life and run RQ's maintenance, when they are due; returns whether."""
        if time.monotonic() - self._beat_at < BEAT_SECONDS:
            return False
        with self.connection.pipeline() as pipeline:
            self.heartbeat(pipeline=pipeline)
            added = pipeline.execute()[0]
        if added:
            # The record was gone: Redis was away for longer than a worker may be silent, or has
            # lost its data.
            self.connection.hset(self.key, mapping=self.serialize())
            register(self)
            self._shown = None
        if self.should_run_maintenance_tasks:
            self.run_maintenance_tasks()  # type: ignore[no-untyped-call]
        self._beat_at = time.monotonic()
        return True

    def enqueue_due(self) -> None:
        """Put jobs into their queues whose time has come: ``enqueue_in``, intervals of ``Retry``
        and ``Repeat``. So none of them needs a scheduler process."""
        if time.monotonic() - self._scheduled_at < SCHEDULE_SECONDS:
            return
        for job_id in self._schedule(keys=self.queue_names(), args=[MOST_DUE]):
            log.info("the time of job %s has come", job_id.decode())
        self._scheduled_at = time.monotonic()

    # RQ's handlers and maintenance

    def cleanup_execution(self, job: Job, pipeline: Pipeline) -> None:
        """RQ calls it in the transaction that ends a job: events go out with that."""
        if self.fence is not None and not pipeline.explicit_transaction:
            staged, pipeline.command_stack = pipeline.command_stack, []
            self.fence(pipeline)
            pipeline.multi()
            pipeline.command_stack = staged
        execution = self.execution
        super().cleanup_execution(job, pipeline)
        # RQ forgets it before the transaction has gone through; when a watched key has changed it
        # builds the transaction again, and would leave the execution behind.
        self.execution = execution
        self._shown = None
        pipeline.hdel(job.key, *RUN_FIELDS)
        if self.on_ending is not None:
            self.on_ending(pipeline)

    def clean_registries(self) -> None:
        """RQ's maintenance without its part for started jobs, which would fail abandoned ones;
        the sweeper puts those back instead."""
        for queue in self.queues:
            if not queue.acquire_maintenance_lock():
                continue
            for registry in (FinishedJobRegistry, FailedJobRegistry, DeferredJobRegistry):
                registry(queue=queue).cleanup()
            clean_worker_registry(queue)
            queue.release_maintenance_lock()  # type: ignore[no-untyped-call]
        self.last_cleaned_at = now()  # type: ignore[assignment]


def _lives(pid: int) -> bool:
    """Whether there is such a process on this machine, other than this one: in a container that
    was started again it has the same id as the one before."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def unique_name() -> str:
    """RQ refuses the name of a worker that was killed until its record expires."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{host}-{os.getpid()}-{uuid4().hex[:6]}"
