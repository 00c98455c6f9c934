"""What the three threads say to each other. Each has one mailbox and reads no other.

The main thread claims jobs, the decode thread runs rows, the traffic thread writes tokens and
endings. A job goes round once: main -> decode (`Admit`) -> traffic (`Admit`, `Stepped`,
`Ended`), and comes back to main only when RQ's own handlers must end it (`NeedsRQ`).
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

from omlx_worker.engine.interface import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import ClaimedJob
from omlx_worker.queue.ending import Ending

# Why a job leaves before it has finished.


@dataclass(frozen=True, slots=True)
class Failed:
    """It can not be served; ``retry`` says whether trying again could help."""

    sentence: str
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody asked for it to be stopped."""

    sentence: str


@dataclass(frozen=True, slots=True)
class GivenBack:
    """This worker will not run it; the next one may."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It is no longer this worker's: nothing may be written about it."""


Reason = Failed | Stopped | GivenBack | Lost

# To the decode thread.


@dataclass(frozen=True, slots=True)
class Admit:
    """Run the rows of a job. Passed on to the traffic thread before anything about the job."""

    job: ActiveJob


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop the rows of a job before the next step; unknown jobs are ignored."""

    claim: ClaimedJob
    reason: Reason


@dataclass(frozen=True, slots=True)
class Drain:
    """Give back the jobs of which no row has started, finish the others, take no more."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give everything back and end the thread."""


# To the traffic thread.


@dataclass(frozen=True, slots=True)
class Stepped:
    """What one decode step added."""

    emissions: list[Emission]


@dataclass(frozen=True, slots=True)
class Ended:
    """A job left before it had finished, or never started."""

    claim: ClaimedJob
    reason: Reason


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing follows: write what is left and end the thread."""


# To the main thread.


@dataclass(frozen=True, slots=True)
class Ring:
    """Look at the queues: jobs may have arrived, or room may have become free."""


@dataclass(frozen=True, slots=True)
class StopJob:
    """RQ's stop-job command."""

    job_id: str


@dataclass(frozen=True, slots=True)
class NeedsRQ:
    """A job whose ending RQ's own handlers must write."""

    claim: ClaimedJob
    ending: Ending


@dataclass(frozen=True, slots=True)
class Crashed:
    """A thread met an error that it cannot go on from."""

    error: BaseException


DecodeMessage = Admit | Cancel | Drain | Stop
TrafficMessage = Admit | Stepped | Ended | Close
MainMessage = Ring | StopJob | NeedsRQ | Crashed

DecodeMailbox = SimpleQueue[DecodeMessage]
TrafficMailbox = SimpleQueue[TrafficMessage]
MainMailbox = SimpleQueue[MainMessage]
