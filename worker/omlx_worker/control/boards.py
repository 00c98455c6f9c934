"""Writes to Redis which models a worker serves, and the figures of each."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from redis import Redis
from redis.utils import str_if_bytes

from omlx_producer.client.workers import LOADING, NOT_LOADED, WorkerFigures, write_figures
from omlx_producer.connection import server_time
from omlx_producer.wire import ModelInfo
from omlx_producer.wire.keys import load_key
from omlx_worker.control.loaded import LoadedModel
from omlx_worker.control.status import (
    LINE_SECONDS,
    WRITE_SECONDS,
    StatusBoard,
    announce,
    sign_off,
)
from omlx_worker.decode.counters import Counters
from omlx_worker.delivery.job_log import JobCounts
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.settings import WorkerSettings

# In this time a loaded model usually gives way, and the figures say which one is loaded next.
CLAIM_SECONDS = 10

log = logging.getLogger("omlx_worker.worker")

Describe = Callable[[WorkerSettings], ModelInfo]


class ModelBoards:
    """Runs on the main thread.

    Args:
        models: of the worker.
        name: of the worker.
        describe: what a model is, before it was loaded. It may raise `ModelError`. Without it
            models are announced once they were loaded.
        jobs: of the worker.

    Attributes:
        counters: of each model, by alias.
        board: of the loaded model; None while there is none.
    """

    board: StatusBoard | None = None

    def __init__(
        self,
        models: Sequence[WorkerSettings],
        connection: Redis,
        name: str,
        describe: Describe | None,
        *,
        jobs: JobCounts,
    ) -> None:
        self.counters = {each.alias: Counters() for each in models}
        self._models = models
        self._connection = connection
        self._name = name
        self._describe = describe
        self._jobs = jobs
        self._infos: dict[str, ModelInfo] = {}
        self._written_at, self._logged_at = float("-inf"), time.monotonic()

    def describe(self) -> None:
        """Read what the models are. One of several that cannot be loaded is announced once it can.

        Raises:
            ModelError: if the only one cannot be loaded.
        """
        if self._describe is None:
            return
        for model in self._models:
            try:
                self._infos[model.alias] = self._describe(model)
            except ModelError as error:
                if len(self._models) == 1:
                    raise
                log.error("%s is not announced: %s", model.alias, error)

    def loads(self) -> None:
        """A model is loaded in place of the one on the board."""
        self.board = None
        self._written_at, self._logged_at = float("-inf"), time.monotonic()

    def claims(self, alias: str) -> bool:
        """Whether this worker is the first to announce that it loads a model; its figures say so
        later."""
        key = load_key(alias)
        first: Any = self._connection.set(key, self._name, nx=True, ex=CLAIM_SECONDS, get=True)
        return first is None or str_if_bytes(first) == self._name

    def serves(self, loaded: LoadedModel) -> None:
        """A model is loaded."""
        self._infos[loaded.alias] = loaded.engine.info
        self.board = StatusBoard(
            self._connection,
            loaded.alias,
            self._name,
            loaded.settings.mode,
            loaded.engine.info,
            counters=self.counters[loaded.alias],
            jobs=self._jobs,
            leases=loaded.leases,
            budget=loaded.decode_thread.budget,
            driver=loaded.decode_thread.driver,
        )

    def announce(self, loaded: LoadedModel) -> None:
        """Make the models known to producers, or tell them that they are still served."""
        if self.board is not None:
            self.board.announce()
        for model in self._unloaded(loaded):
            announce(self._connection, model.alias, self._infos[model.alias])

    def show(self, loaded: LoadedModel, state: str) -> None:
        """Write the figures of all models, if it is time to; see `StatusBoard.show`. While a model
        is loaded, log a line now and then."""
        if self.board is not None:
            self.board.show(state)
        unloaded, now = self._unloaded(loaded), time.monotonic()
        if unloaded and now - self._written_at >= WRITE_SECONDS:
            self._written_at = now
            for model in unloaded:
                moment = {"at": server_time(self._connection)}
                figures = self._figures(model, loaded).model_copy(update=moment)
                write_figures(self._connection, model.alias, figures)
        if loaded.is_loading and now - self._logged_at >= LINE_SECONDS:
            self._logged_at = now
            log.info("loading %s: %s", loaded.alias, loaded.progress)

    def figures(self, loaded: LoadedModel) -> dict[str, WorkerFigures]:
        """See `StatusBoard.figures`; those of all models, by alias."""
        board = self.board
        found = {} if board is None else {loaded.alias: board.figures()}
        for model in self._unloaded(loaded):
            found.setdefault(model.alias, self._figures(model, loaded))
        return found

    def sign_off(self) -> None:
        """Delete the figures of this worker, and tell models that nobody serves any more."""
        for model in self._models:
            info = self._infos.get(model.alias)
            sign_off(self._connection, model.alias, self._name, info)

    def _unloaded(self, loaded: LoadedModel) -> list[WorkerSettings]:
        """The known models that are not loaded. One is not known if it could not be loaded yet."""
        known = [each for each in self._models if each.alias in self._infos]
        return [each for each in known if each.alias != loaded.alias or self.board is None]

    def _figures(self, model: WorkerSettings, loaded: LoadedModel) -> WorkerFigures:
        """The figures of a model that is not loaded."""
        counters, info = self.counters[model.alias], self._infos[model.alias]
        is_next = model.alias == loaded.alias
        loads = is_next and loaded.is_loading
        return WorkerFigures(
            **asdict(counters) | {"rows": 0, "waiting": 0},
            name=self._name,
            host=socket.gethostname(),
            fingerprint=info.system_fingerprint or "",
            state=LOADING if loads else NOT_LOADED,
            progress=loaded.progress if loads else "",
            turned_to="" if is_next else loaded.alias,
            uptime=time.monotonic() - loaded.since,
            lease_seconds=model.lease_seconds,
            jobs=0,
            max_rows=0,
            mode=model.mode,
            depth=0,
            reason="",
            all_prompt_tokens=counters.prompt_tokens + counters.cached_tokens,
            drafted=counters.drafts.drafted,
            accepted=sum(counters.drafts.accepted),
            cache_bytes=0,
            weight_bytes=0,
            memory_limit=0,
        )
