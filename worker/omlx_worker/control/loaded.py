"""The model of a worker and the threads that serve it, from its loading to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from redis import Redis

from omlx_producer.client.workers import LOADING
from omlx_worker.control.admission import Admission
from omlx_worker.decode.thread import DecodeThread
from omlx_worker.delivery.observers import Observers
from omlx_worker.delivery.publisher import Publisher
from omlx_worker.engine.rows.interface import Engine, Tell
from omlx_worker.messages import (
    Drain,
    MainMailbox,
    Prepared,
    Ring,
    Stop,
    StopJob,
    TrafficMailbox,
)
from omlx_worker.queue.lease import LeaseTable
from omlx_worker.settings import WorkerSettings

log = logging.getLogger("omlx_worker.worker")

THREAD_SECONDS = 5.0

MakeEngine = Callable[[WorkerSettings, Tell], Engine]


class LoadedModel:
    """Runs on the main thread.

    Args:
        name: of the worker.
        make_engine: called once, on the decode thread. It may tell what it does; see `progress`.
        main: of the main thread, see `messages`.
        outside: see `MemoryBudget`; called from any thread.

    Attributes:
        leases: of the model's queues.
        loading: the engine, once it is made; None before `load`.
        since: monotonic seconds when it was made or, later, began to serve.
        admission: None until the model serves.
    """

    loading: Future[Engine] | None = None
    admission: Admission | None = None

    def __init__(
        self,
        settings: WorkerSettings,
        connection: Redis,
        name: str,
        *,
        make_engine: MakeEngine,
        main: MainMailbox,
        observers: Observers,
        outside: Callable[[], int],
    ) -> None:
        self.since = time.monotonic()
        self.settings = settings
        self.leases = LeaseTable(
            connection,
            name,
            settings.queues,
            seconds=settings.lease_seconds,
            on_free=lambda: main.put(Ring()),
            on_stop=lambda claim: main.put(StopJob(claim.id)),
        )
        self._main = main
        self._observers = observers
        self._traffic: TrafficMailbox = SimpleQueue()
        self.decode_thread = DecodeThread(
            settings,
            lambda tell: make_engine(settings, tell),
            self._traffic,
            main,
            outside=outside,
        )
        self.publisher = Publisher(
            self.leases,
            self._traffic,
            main,
            self.decode_thread.submit,
            self.decode_thread.outbox,
            observers,
        )

    @property
    def patience(self) -> float | None:
        """See `Admission.patience`."""
        return self.admission.patience if self.admission else None

    @property
    def is_paused(self) -> bool:
        """See `Admission.paused`."""
        return self.admission is not None and self.admission.paused

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and self.admission is None

    def moment(self) -> dict[str, Any]:
        """What `UnloadedBoard` tells until the model serves."""
        return {
            "state": LOADING,
            "progress": self.decode_thread.progress,
            "uptime": time.monotonic() - self.since,
            "mode": self.settings.mode,
            "lease_seconds": self.settings.lease_seconds,
        }

    @property
    def is_made(self) -> bool:
        """Whether nothing is being loaded now."""
        return self.loading is None or self.loading.done()

    def load(self) -> None:
        """Begin to load the model; rings the main thread when that is over."""
        self.loading = self.decode_thread.start()
        self.loading.add_done_callback(lambda _: self._main.put(Ring()))

    def serve(self) -> None:
        """Take jobs from now on. Waits until the model is loaded.

        Raises:
            Exception: what the engine raised when it was made.
        """
        assert self.loading is not None
        self.engine = self.loading.result()
        self.admission = Admission(
            self.leases,
            self.engine,
            self.decode_thread.budget,
            alias=self.settings.alias,
            main=self._main,
            submit=self.decode_thread.submit,
            traffic=self._traffic,
            observers=self._observers,
        )
        self.publisher.start()
        self.since = time.monotonic()

    def take(self) -> bool:
        """See `Admission.take`."""
        assert self.admission is not None
        size = self.decode_thread.driver.batch_size
        return self.admission.take(size.places, size.rows)

    def wind_down(self) -> None:
        """Start no job, and give back those that have not started."""
        if self.admission is not None:
            self.admission.give_back_coming()
        self.decode_thread.submit(Drain())

    def fail_timed_out(self) -> None:
        """See `Admission.fail_timed_out`."""
        if self.admission is not None:
            self.admission.fail_timed_out()

    def handle(self, message: StopJob | Prepared) -> None:
        """Do what a message about a job says."""
        match message, self.admission:
            case StopJob(job_id), Admission() as admission:
                admission.stop(job_id)
            case Prepared(), Admission() as admission:
                admission.prepared(message)

    def close(self, seconds: float = THREAD_SECONDS, *, gives_back: bool = True) -> None:
        """End the threads, and give back the jobs that run, unless one may be to blame.

        Args:
            seconds: to wait for each thread.
        """
        if self.loading is None:
            return
        if self.admission is not None:
            self.admission.close()
            if gives_back:
                self.admission.give_back()
        self.decode_thread.submit(Stop())
        if not self.decode_thread.join(seconds) and not self.is_loading:
            log.warning("the engine is still busy; ending without it")
        if self.admission is not None:
            self.admission.join(seconds)
        self._traffic.put(Stop())
        if not self.is_loading:
            self.publisher.join(seconds)
