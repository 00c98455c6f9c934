"""The worker's figures: in Redis for everybody, and as a line of the log."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence

from redis import Redis

from omlx_producer.client.models import read_models
from omlx_producer.client.workers import (
    WorkerFigures,
    forget_gone,
    read_workers,
    server_time,
    workers_key,
    write_figures,
)
from omlx_producer.terminal import counted, in_units
from omlx_producer.wire import MODELS_KEY, ModelInfo
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.delivery.job_log import JobCounts
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.status")

WRITE_SECONDS, IDLE_WRITE_SECONDS = 2.0, 5.0
LINE_SECONDS = 10.0
# Looking at all workers costs the square of their number: rarely, after the first minute.
COMPARE_SECONDS, YOUNG_SECONDS = 300.0, 60.0


class StatusBoard:
    """Runs on the main thread. Reads the decode thread's counters.

    Args:
        mode: as the user chose it.
        conditions: see `WorkerFigures`.
        machine_memory: bytes of this machine; None asks the system.
    """

    def __init__(
        self,
        connection: Redis,
        model_alias: str,
        name: str,
        mode: str,
        *,
        max_rows: int,
        counters: Counters,
        jobs: JobCounts,
        leases: LeaseTable,
        budget: MemoryBudget,
        driver: DepthDriver,
        conditions: Callable[[], Sequence[str]] = tuple,
        machine_memory: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._model_alias = model_alias
        self._name = name
        self._mode = mode
        self._max_rows = max_rows
        self._counters = counters
        self._leases = leases
        self._budget = budget
        self._driver = driver
        self._conditions = conditions
        self._clock = clock
        self._started_at = self._told_at = clock()
        self._jobs = jobs
        self._told_jobs = self._told_cut = 0
        self._written_at, self._written = float("-inf"), self.figures()
        self._machine_memory = machine_memory or (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )
        self._compare_at = float("-inf")
        self._warned_of: set[str | None] = set()
        self._warned_beside = {name}
        self._first_announced_at: float | None = None

    def announce(self, info: ModelInfo, *, served: bool = True) -> None:
        """Make the model known to producers, or tell them that it is still served, or no longer."""
        now = server_time(self._connection) if served else 0.0
        self._first_announced_at = self._first_announced_at or now
        if served and self._is_to_compare():
            forget_gone(self._connection, self._model_alias)
            self._compare(info)
            self._compare_claims(self._first_announced_at)
        told = info.model_copy(update={"announced_at": now})
        self._connection.hset(MODELS_KEY, self._model_alias, told.model_dump_json())

    def _is_to_compare(self) -> bool:
        now = self._clock()
        if now < self._compare_at and now - self._started_at > YOUNG_SECONDS:
            return False
        self._compare_at = now + COMPARE_SECONDS
        return True

    def _compare(self, info: ModelInfo) -> None:
        """Warn, once for each, of another model that a living worker serves under this alias."""
        other = read_models(self._connection).get(self._model_alias, info)
        theirs, ours = other.system_fingerprint, info.system_fingerprint
        if theirs in (None, ours, *self._warned_of):
            return
        workers = read_workers(self._connection, self._model_alias)
        if any(worker.name != self._name for worker in workers):
            self._warned_of.add(theirs)
            log.warning(
                "another worker serves %s with another model (%s, %s; here %s, %s), so a job may "
                "get either; give one of the workers another --model-alias",
                *(self._model_alias, other.model, theirs, info.model, ours),
            )

    def _compare_claims(self, since: float) -> None:
        """Warn if the workers of this machine may take more than it has; once for each new one.

        Args:
            since: when this worker announced its model first, on the server's clock.
        """
        limits = {self._name: self._budget.limit} | {
            worker.name: worker.memory_limit
            for alias in read_models(self._connection)
            for worker in read_workers(self._connection, alias)
            # Figures from before this worker's start may be those of a dead one.
            if worker.host == socket.gethostname()
            and worker.at > since
            and worker.name != self._name
        }
        together = sum(limits.values())
        if together <= self._machine_memory or limits.keys() <= self._warned_beside:
            return
        self._warned_beside.update(limits)
        log.warning(
            "the workers of this machine may take %s together (%s), and it has %s; give each a "
            "--memory-limit",
            in_units(together),
            ", ".join(f"{name} {in_units(limit)}" for name, limit in sorted(limits.items())),
            in_units(self._machine_memory),
        )

    def show(self, state: str, rests_until: float | None = None) -> None:
        """Write the figures, if it is time to; while there is work, log a line now and then.

        Args:
            rests_until: see `WorkerFigures`.

        Raises:
            redis.exceptions.RedisError: if Redis does not take them now.
        """
        now = self._clock()
        idle = state == self._written.state == "idle"
        if now - self._written_at < (IDLE_WRITE_SECONDS if idle else WRITE_SECONDS):
            return
        self._written_at = now
        moment = {
            "at": server_time(self._connection),
            "state": state,
            "conditions": list(self._conditions()),
            "rests_until": rests_until,
        }
        figures = self.figures().model_copy(update=moment).since(self._written)
        self._written = figures
        write_figures(self._connection, self._model_alias, figures)
        jobs, cut = self._jobs.finished - self._told_jobs, self._jobs.cut - self._told_cut
        if (figures.rows or jobs) and now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            self._told_jobs, self._told_cut = self._jobs.finished, self._jobs.cut
            ended = f", {counted(cut, 'text')} cut by length" if cut else ""
            log.info("%s finished%s, %s", counted(jobs, "job"), ended, line(figures))

    def sign_off(self, info: ModelInfo) -> None:
        """Delete the figures of this worker, and say so if it was the model's last."""
        self._connection.hdel(workers_key(self._model_alias), self._name)
        if not read_workers(self._connection, self._model_alias):
            self.announce(info, served=False)

    def figures(self) -> WorkerFigures:
        """What the worker does at the moment, without rates. Asks nothing of Redis; called from any
        thread."""
        counters, drafts, sizes = self._counters, self._counters.drafts, self._leases.sizes
        read, cached = counters.prompt_tokens, counters.cached_tokens
        return WorkerFigures(
            name=self._name,
            host=socket.gethostname(),
            uptime=self._clock() - self._started_at,
            lease_seconds=self._leases.seconds,
            jobs=len(self._leases),
            rows=counters.batch,
            max_rows=self._max_rows,
            waiting=counters.waiting,
            mode=self._mode,
            depth=self._driver.depth,
            reason=self._driver.reason,
            tokens=counters.tokens,
            prompt_tokens=read,
            cached_tokens=cached,
            all_prompt_tokens=read + cached,
            drafted=drafts.drafted,
            accepted=sum(drafts.accepted),
            steps=counters.steps,
            decode_rows=counters.rows,
            prompt_windows=counters.windows,
            pauses=counters.pauses,
            cache_bytes=self._budget.bytes_for(sizes) if sizes else 0,
            weight_bytes=self._budget.weights,
            memory_limit=self._budget.limit,
        )


def line(figures: WorkerFigures) -> str:
    """The figures as one line of a log."""
    accepted = "" if figures.acceptance is None else f", {figures.acceptance:.0%} accepted"
    cached = f", {figures.cached:.0%} of prompts cached" if figures.cached else ""
    return (
        f"{counted(figures.rows, 'row')}, {figures.waiting} waiting, {figures.mode}, "
        f"depth {figures.depth}{accepted}{cached}, {figures.tokens_per_second:.0f} tokens/s, "
        f"caches {in_units(figures.cache_bytes)} of "
        f"{in_units(max(0, figures.memory_limit - figures.weight_bytes))}"
        + "".join(f", {condition}" for condition in figures.conditions)
    )
