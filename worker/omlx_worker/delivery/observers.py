"""What hangs on the jobs of a worker, such as its log and its metrics: one list, one call a hook.

For each claim the calls come in this order: `claimed`, `started`, `first_token`, `stepped` for
every step, `ended`. A job that never starts has only the first and the last, and `ended` comes
exactly once. `claimed` and `started` are called on the main thread, the others on the traffic
thread. `ended` is called on the main thread too: while the worker shuts down, and for a job that
has left while it was prepared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from omlx_producer.wire.end import STATES
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker.delivery.observers")


LEFT = ("retried", "given back", "lost", "unwritten", "abandoned")
"""How a job leaves without an end. `unwritten`: Redis did not take one. `abandoned`: the worker
broke."""
OUTCOMES = (*dict.fromkeys(state.outcome for state in STATES.values()), *LEFT)


class JobObserver:
    """Hears of jobs. No method may wait; each does nothing unless it is overridden."""

    def claimed(self, claim: Claim) -> None:
        """The worker has taken the job from its queue."""

    def started(self, job: ActiveJob) -> None:
        """The job is prepared and goes to the decode thread."""

    def first_token(self, job: ActiveJob, at: float) -> None:
        """This run of the job has its first tokens; `stepped` brings them next."""

    def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
        """A step has brought these emissions of jobs that have not ended.

        Args:
            at: monotonic seconds at the end of the step.
        """

    def ended(self, claim: Claim, job: ActiveJob | None, outcome: str, error: str) -> None:
        """The job has left this worker.

        Args:
            job: None if it did not start, or if its figures are gone.
            outcome: one of `OUTCOMES`.
            error: quotes nothing of a request that did not start.
        """


class Observers(JobObserver):
    """Passes each call on to every observer. One that raises is named in the log once."""

    def __init__(self, *observers: JobObserver) -> None:
        self._observers = list(observers)
        self._failed = set[JobObserver]()

    def add(self, observer: JobObserver) -> None:
        self._observers.append(observer)

    def claimed(self, claim: Claim) -> None:
        self._tell(lambda each: each.claimed(claim))

    def started(self, job: ActiveJob) -> None:
        self._tell(lambda each: each.started(job))

    def first_token(self, job: ActiveJob, at: float) -> None:
        self._tell(lambda each: each.first_token(job, at))

    def stepped(self, emissions: Sequence[tuple[ActiveJob, Emission]], at: float) -> None:
        self._tell(lambda each: each.stepped(emissions, at))

    def ended(
        self, claim: Claim, job: ActiveJob | None = None, outcome: str = "lost", error: str = ""
    ) -> None:
        """See `JobObserver.ended`. A claim that has ended before is ignored."""
        if not claim.ended:
            claim.ended = True
            self._tell(lambda each: each.ended(claim, job, outcome, error))

    def _tell(self, call: Callable[[JobObserver], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception as error:  # noqa: BLE001 (logged; the job goes on)
                if observer not in self._failed:
                    self._failed.add(observer)
                    log.error("%s failed and is told on: %r", type(observer).__name__, error)
