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

from omlx_producer.wire import End
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim

# Reasons why a job leaves before it has finished; an `End` without an answer is one.


@dataclass(frozen=True, slots=True)
class GivenBack:
    """This worker will not run the job; another one may."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The lease is gone: nothing may be written about the job."""


STOPPED = End("cancelled", "the job was stopped on request")
Reason = End | GivenBack | Lost
Readiness = ActiveJob | End | GivenBack
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
