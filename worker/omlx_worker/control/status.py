"""The worker's figures: in Redis for everybody, and as a line of the log."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from redis import Redis

from omlx_producer.client.workers import (
    SILENT_SECONDS,
    WorkerFigures,
    forget_gone,
    read_workers,
    write_figures,
)
from omlx_producer.connection import server_time
from omlx_producer.figures import read_figures
from omlx_producer.terminal import counted, in_units
from omlx_producer.wire import MODELS_KEY, ModelInfo, workers_key
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.delivery.job_log import JobCounts
from omlx_worker.queue.lease import LeaseTable

log = logging.getLogger("omlx_worker.status")

WRITE_SECONDS, IDLE_WRITE_SECONDS = 2.0, 5.0
LINE_SECONDS = 10.0
# Looking at all workers costs the square of their number.
COMPARE_SECONDS = 300.0


class StatusBoard:
    """Runs on the main thread. Reads the decode thread's counters.

    Args:
        mode: as the user chose it.
        machine_memory: bytes of this machine; None asks the system.
    """

    def __init__(
        self,
        connection: Redis,
        model_alias: str,
        name: str,
        mode: str,
        info: ModelInfo,
        *,
        counters: Counters,
        jobs: JobCounts,
        leases: LeaseTable,
        budget: MemoryBudget,
        driver: DepthDriver,
        machine_memory: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._model_alias = model_alias
        self._name = name
        self._mode = mode
        self._info = info
        self._counters = counters
        self._leases = leases
        self._budget = budget
        self._driver = driver
        self._clock = clock
        self._started_at = self._told_at = clock()
        self._jobs = jobs
        self._told_jobs, self._told_cut = jobs.finished, jobs.cut
        self._machine_memory = machine_memory or (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        )
        self._written_at, self._written = float("-inf"), self.figures()
        # Figures of a worker that this one replaces have fallen silent by then.
        self._compare_at = clock() + 2 * SILENT_SECONDS
        self._warned_of = set[str]()

    def announce(self) -> None:
        """Make the model known to producers, or tell them that it is still served.

        Now and then it also warns of what is wrong with the options of the model's workers, once of
        each fault.
        """
        if self._clock() >= self._compare_at:
            self._compare_at = self._clock() + COMPARE_SECONDS
            forget_gone(self._connection, self._model_alias)
            for model in read_figures(self._connection):
                if model.alias == self._model_alias:
                    self._warn(model.warnings)
        announce(self._connection, self._model_alias, self._info)

    def _warn(self, warnings: list[str]) -> None:
        for warning in warnings:
            if warning not in self._warned_of:
                log.warning("%s", warning)
        self._warned_of.update(warnings)

    def show(self, state: str) -> None:
        """Write the figures, if it is time to; while there is work, log a line now and then.

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
        }
        figures = self.figures().model_copy(update=moment).since(self._written)
        if not figures.is_same_step(self._written):
            self._written = figures
        write_figures(self._connection, self._model_alias, figures)
        self._count_waiting()
        jobs, cut = self._jobs.finished - self._told_jobs, self._jobs.cut - self._told_cut
        if (figures.rows or jobs) and now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            self._told_jobs, self._told_cut = self._jobs.finished, self._jobs.cut
            ended = f", {counted(cut, 'text')} cut by length" if cut else ""
            log.info("%s finished%s, %s", counted(jobs, "job"), ended, line(figures))

    def _count_waiting(self) -> None:
        """Tell how many rows run or wait in the queue for bulk, if it is asked."""
        size = self._driver.batch_size
        if size.asks:
            [model] = read_figures(self._connection, self._model_alias)
            size.held = self._counters.rows + model.queues["bulk"].waiting

    def sign_off(self) -> None:
        """See `UnloadedBoard.sign_off`."""
        sign_off(self._connection, self._model_alias, self._name, self._info)

    def figures(self) -> WorkerFigures:
        """What the worker does at the moment, without rates. Asks nothing of Redis; called from any
        thread."""
        counters, sizes = self._counters, self._leases.sizes
        size = self._driver.batch_size
        return WorkerFigures(
            **asdict(counters),
            name=self._name,
            host=socket.gethostname(),
            machine_memory=self._machine_memory,
            fingerprint=self._info.system_fingerprint or "",
            uptime=self._clock() - self._started_at,
            lease_seconds=self._leases.seconds,
            jobs=len(self._leases),
            max_rows=size.places,
            mode=self._mode,
            depth=self._driver.depth,
            reason=self._driver.reason,
            all_prompt_tokens=counters.prompt_tokens + counters.cached_tokens,
            drafted=counters.drafts.drafted,
            accepted=sum(counters.drafts.accepted),
            cache_bytes=self._budget.bytes_for(sizes) if sizes else 0,
            weight_bytes=self._budget.weights,
            memory_limit=self._budget.limit,
        )


class Turn(BaseModel):
    """What the process of one of several models knows of its turn.

    Attributes:
        switches: how often the model was loaded in place of another one, this time included.
        switch_seconds: what that took before this time.
        left_at: monotonic seconds, when the model before it was told to end; None without one.
    """

    switches: int = 0
    switch_seconds: float = 0.0
    left_at: float | None = None


class UnloadedBoard:
    """What a worker tells of a model that it serves and has not loaded. Runs on the main thread.

    Args:
        name: of the worker.
        moment: the figures of now, state and uptime among them; called from any thread.

    Attributes:
        info: None until it is known.
    """

    info: ModelInfo | None = None

    def __init__(
        self,
        connection: Redis,
        model_alias: str,
        name: str,
        moment: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._connection = connection
        self._model_alias = model_alias
        self._name = name
        self._moment = moment
        self._written_at, self._told_at = float("-inf"), time.monotonic()

    def announce(self) -> None:
        """See `StatusBoard.announce`."""
        if self.info is not None:
            announce(self._connection, self._model_alias, self.info)

    def show(self, _: str = "") -> None:
        """Write the figures, if it is time to. While the model is loaded, also announce it, and log
        a line now and then.

        The state is that of the moment.
        """
        now = time.monotonic()
        if now - self._written_at >= WRITE_SECONDS:
            self._written_at = now
            figures = self.figures().model_copy(update={"at": server_time(self._connection)})
            write_figures(self._connection, self._model_alias, figures)
            if not figures.is_loading:
                return
            self.announce()
            if now - self._told_at >= LINE_SECONDS:
                self._told_at = now
                log.info("loading %s: %s", self._model_alias, figures.progress)

    def hurry(self) -> None:
        """Write the figures at the next `show`."""
        self._written_at = float("-inf")

    def figures(self) -> WorkerFigures:
        """See `StatusBoard.figures`."""
        figures = {
            **asdict(Counters()),
            "name": self._name,
            "host": socket.gethostname(),
            "fingerprint": (self.info and self.info.system_fingerprint) or "",
            "reason": "",
            **dict.fromkeys(("jobs", "max_rows", "depth"), 0),
            **dict.fromkeys(("cache_bytes", "weight_bytes", "memory_limit"), 0),
        }
        return WorkerFigures.model_validate({**figures, **self._moment()})

    def sign_off(self) -> None:
        """Delete the figures, and say so if the worker was the model's last."""
        sign_off(self._connection, self._model_alias, self._name, self.info)


def announce(connection: Redis, alias: str, info: ModelInfo, *, served: bool = True) -> None:
    """Make a model known to producers, or tell them that no worker serves it any more."""
    now = server_time(connection) if served else 0.0
    told = info.model_copy(update={"announced_at": now})
    connection.hset(MODELS_KEY, alias, told.model_dump_json())


def sign_off(connection: Redis, alias: str, name: str, info: ModelInfo | None) -> None:
    """Delete a worker's figures of a model, and say so if it was the model's last."""
    connection.hdel(workers_key(alias), name)
    if info is not None and not read_workers(connection, alias):
        announce(connection, alias, info, served=False)


def line(figures: WorkerFigures) -> str:
    """The figures as one line of a log."""
    accepted = "" if figures.acceptance is None else f", {figures.acceptance:.0%} accepted"
    cached = f", {figures.cached:.0%} of prompts cached" if figures.cached else ""
    return (
        f"{counted(figures.rows, 'row')}, {figures.waiting} waiting, {figures.mode}, "
        f"depth {figures.depth}{accepted}{cached}, {figures.tokens_per_second:.0f} tokens/s, "
        f"caches {in_units(figures.cache_bytes)} of "
        f"{in_units(max(0, figures.memory_limit - figures.weight_bytes))}"
    )
