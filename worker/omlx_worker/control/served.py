"""One of several models that a worker serves in turn, as the worker that has not loaded it knows
it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis import Redis

from omlx_producer.client.models import parse_models
from omlx_producer.client.workers import NOT_LOADED, parse_workers
from omlx_producer.terminal import duration
from omlx_producer.wire import MODELS_KEY, workers_key
from omlx_worker.control.status import Turn, UnloadedBoard
from omlx_worker.control.worker import Describe
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.queue.upkeep import Upkeep
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.worker")

# After a model could not be served. Each time in a row doubles it.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 600.0


class ServedModel:
    """Runs on the main thread.

    Args:
        name: of the worker.
        moment: see `UnloadedBoard`; what the worker does at the moment.

    Attributes:
        leases: an empty table: the process of the model holds its jobs.
        turn: as it was when the model was loaded last.
        fault: why its last process has ended; empty once it serves.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        connection: Redis,
        name: str,
        moment: Callable[[], Mapping[str, Any]],
    ) -> None:
        self.settings = settings
        self.alias = settings.alias
        self.leases = LeaseTable(connection, name, settings.queues, seconds=settings.lease_seconds)
        self.upkeep = Upkeep(self.leases)
        self.board = UnloadedBoard(connection, settings.alias, name, self._figures)
        self.turn = Turn()
        self.fault = ""
        self._moment = moment
        self._connection = connection
        self._name = name
        # Ends of its processes before they served, in a row.
        self._failures = 0
        self._retry_at = 0.0

    def learn(self, describe: Describe) -> None:
        """Read what the model is. One that cannot be read is announced once it was loaded."""
        try:
            self.board.info = describe(self.settings)
        except ModelError as error:
            self.failed(str(error))

    @property
    def rests(self) -> float:
        """Seconds until it may be loaded again after a fault; 0 without one."""
        return max(0.0, self._retry_at - time.monotonic())

    def failed(self, fault: str) -> None:
        """It could not be served: load it again after a while."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self.fault, self._retry_at = fault, time.monotonic() + pause
        log.error("%s is not served: %s; the next try is in %s", self.alias, fault, duration(pause))

    def is_ready(self) -> bool:
        """Whether its process has loaded it, which its figures say. Then learn what they tell."""
        document: Any = self._connection.hget(workers_key(self.alias), self._name)
        [figures] = parse_workers({self._name: document}) if document else [None]
        if figures is None or figures.is_loading or not figures.takes_jobs:
            return False
        info: Any = self._connection.hget(MODELS_KEY, self.alias)
        if info is not None and (found := parse_models({self.alias: info})):
            self.board.info = found[self.alias]
        self.turn = Turn(switches=figures.switches, switch_seconds=figures.switch_seconds)
        self.fault, self._failures = "", 0
        return True

    def _figures(self) -> dict[str, Any]:
        rests = self.rests
        return {
            "state": NOT_LOADED,
            "mode": self.settings.mode,
            "lease_seconds": self.settings.lease_seconds,
            **self._moment(),
            "fault": self.fault if rests else "",
            "retry_in": rests,
            "switches": self.turn.switches,
            "switch_seconds": self.turn.switch_seconds,
        }
