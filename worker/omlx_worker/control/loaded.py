"""A loaded model and the threads that serve it, from its loading to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from omlx_producer.errors import one_line
from omlx_producer.wire import End
from omlx_worker.control.admission import Admission
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.thread import DecodeThread
from omlx_worker.delivery.observers import Observers
from omlx_worker.delivery.publisher import Publisher
from omlx_worker.engine.rows.interface import Engine, ModelError, Tell
from omlx_worker.messages import (
    Drain,
    Drop,
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
REFUSED_AT_ONCE = 100

MakeEngine = Callable[[WorkerSettings, Tell], Engine]


class LoadedModel:
    """Runs on the main thread.

    Args:
        leases: of the model's queues.
        counters: of the model, from all the times that it was loaded.
        make_engine: called once, on the decode thread. It may tell what it does; see `progress`.
        main: of the main thread, see `messages`.
        outside: see `MemoryBudget`; called from any thread.

    Attributes:
        loading: the engine, once it is made; None before `load`.
        fault: why the model cannot be loaded; empty otherwise.
        since: monotonic seconds when it was made or, later, began to serve.
        admission: None until the model serves.
    """

    loading: Future[Engine] | None = None
    fault = ""
    admission: Admission | None = None

    def __init__(
        self,
        settings: WorkerSettings,
        leases: LeaseTable,
        counters: Counters,
        *,
        make_engine: MakeEngine,
        main: MainMailbox,
        observers: Observers,
        outside: Callable[[], int],
    ) -> None:
        self.since = time.monotonic()
        self.settings = settings
        self.leases = leases
        self._main = main
        self._observers = observers
        self._traffic: TrafficMailbox = SimpleQueue()
        self.decode_thread = DecodeThread(
            settings,
            lambda tell: make_engine(settings, tell),
            self._traffic,
            main,
            counters=counters,
            outside=outside,
        )
        self.publisher = Publisher(
            leases,
            self._traffic,
            main,
            self.decode_thread.submit,
            self.decode_thread.outbox,
            observers,
        )

    @property
    def alias(self) -> str:
        return self.settings.alias

    @property
    def max_rows(self) -> int:
        """How many rows it may run now; 1 until it serves."""
        return self.decode_thread.driver.batch_size.places if self.admission else 1

    @property
    def bulk_rows(self) -> int:
        """Up to how many rows bulk rows join; see `BatchSize.rows`."""
        return self.decode_thread.driver.batch_size.rows

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
        return self.loading is not None and not (self.fault or self.admission)

    @property
    def progress(self) -> str:
        """See `DecodeThread`."""
        return self.decode_thread.progress

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

    def fail(self, error: Exception) -> None:
        """The model cannot be loaded: `refuse` jobs from now on."""
        self.fault = str(error)
        if not isinstance(error, ModelError):
            log.error("%s cannot be loaded", self.alias, exc_info=error)
            told = one_line(f"{type(error).__name__}: {error}")
            self.fault = f"--model {self.settings.model}: cannot be loaded: {told}"
        # Its frames hold what was loaded.
        error.__traceback__ = error.__context__ = None
        self.publisher.start()

    def refuse(self) -> bool:
        """Fail jobs that wait for a model with a fault; returns whether there were any."""
        claims = self.leases.claim(REFUSED_AT_ONCE) or []
        for claim in claims:
            self._observers.claimed(claim)
            self._traffic.put(Drop(claim, End("failed", self.fault)))
        return bool(claims)

    def wind_down(self) -> None:
        """Start no job, and give back those that have not started."""
        if self.admission is not None:
            self.admission.give_back_coming()
        self.decode_thread.submit(Drain())

    def give_back(self) -> None:
        """See `Admission.give_back`."""
        if self.admission is not None:
            self.admission.give_back()

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

    def close(self, seconds: float = THREAD_SECONDS, *, gives_back: bool = True) -> bool:
        """End the threads, and give back the jobs that run, unless one may be to blame.

        Args:
            seconds: to wait for each thread.

        Returns:
            Whether the engine has ended.
        """
        if self.loading is None:
            return True
        if self.admission is not None:
            self.admission.close()
        if gives_back:
            self.give_back()
        self.decode_thread.submit(Stop())
        ended = self.decode_thread.join(seconds)
        if not ended:
            log.warning("the engine is still busy; ending without it")
        if self.admission is not None:
            self.admission.join(seconds)
        self._traffic.put(Stop())
        if not self.is_loading:
            self.publisher.join(seconds)
        return ended
