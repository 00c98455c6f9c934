"""The messages between threads. Each of the three main ones reads one mailbox.

The main thread claims jobs, two others prepare them for it (`Prepared`), the decode thread runs
rows, the traffic thread writes tokens and endings. A job passes the three once: main -> decode
(`Admit`) -> traffic (`Admit`, `Stepped`, `Drop`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Self

from omlx_producer.errors import InvalidRequest, one_line
from omlx_producer.wire import CancelledEvent, FailedEvent
from omlx_worker.engine.rows.row import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Ending

# Reasons why a job leaves before it has finished.


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot be served. ``retry`` says whether another try could help.

    Attributes:
        code: see `omlx_producer.JobFailed`, as for ``field``.
    """

    sentence: str
    retry: bool = True
    code: str = "failed"
    field: str = ""

    @classmethod
    def refusing(cls, error: InvalidRequest) -> Self:
        """The end of a job whose request can never be served."""
        return cls(one_line(str(error)), False, "invalid_request", error.field or "")

    def ending(self, job_id: str, n: int) -> Ending:
        """The ending after ``n`` tokens."""
        event = FailedEvent(
            job_id=job_id, n=n, error=self.sentence, code=self.code, field=self.field
        )
        return Ending("failed", event, retry=self.retry)


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job was stopped on request."""

    sentence: str

    def ending(self, job_id: str, n: int) -> Ending:
        """The ending after ``n`` tokens."""
        return Ending("stopped", CancelledEvent(job_id=job_id, n=n, error=self.sentence))


@dataclass(frozen=True, slots=True)
class GivenBack:
    """This worker will not run the job; another one may."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is gone: nothing may be written about the job."""


Reason = Failed | Stopped | GivenBack | Lost
Readiness = ActiveJob | Failed | Stopped | GivenBack
"""What preparing a claimed job has come to: it is ready to run, or why it is not."""

# To the decode thread, which passes the first two on to the traffic thread.


@dataclass(frozen=True, slots=True)
class Admit:
    """Run the rows of jobs. The traffic thread gets it before anything else about them.

    In one message, so that their prompts are read together.
    """

    jobs: Sequence[ActiveJob]


@dataclass(frozen=True, slots=True)
class Drop:
    """A job leaves before it has finished, or never starts.

    The decode thread drops its rows before the next step and ignores an unknown job. The traffic
    thread writes the ending.
    """

    claim: Claim
    reason: Reason


@dataclass(frozen=True, slots=True)
class Stop:
    """The last message: end the thread. The traffic thread writes the rest first."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Give back the jobs that have not started, finish the others."""


# To the traffic thread.


@dataclass(frozen=True, slots=True)
class Stepped:
    """The emissions of one decode step, and the monotonic seconds at its end."""

    emissions: list[Emission]
    at: float = field(default_factory=time.monotonic, compare=False)


# To the main thread.


@dataclass(frozen=True, slots=True)
class Ring:
    """Look at the queues: jobs may have arrived, or rows may be free."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """A job is to be stopped: RQ's command, or the mark in its hash, says so."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A claimed job is ready to run, or cannot."""

    claim: Claim
    outcome: Readiness


@dataclass(frozen=True, slots=True)
class Crashed:
    """A thread ended with an error."""

    error: BaseException


DecodeMessage = Admit | Drop | Drain | Stop
TrafficMessage = Admit | Stepped | Drop | Stop
MainMessage = Ring | StopJob | Prepared | Crashed

DecodeMailbox = SimpleQueue[DecodeMessage]
TrafficMailbox = SimpleQueue[TrafficMessage]
MainMailbox = SimpleQueue[MainMessage]
