"""How a job, or a row of a batch, ends: one record, and the one table of its codes.

An end travels as an `EndEvent`, in RQ's result, in the output line of a row, and as a `JobError`. A
new state of jobs is a line of `STATES`; it needs neither a new type nor a new script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self

from omlx_producer.errors import (
    InvalidRequest,
    JobCancelled,
    JobError,
    JobFailed,
    one_line,
    spelled,
)

Status = Literal["queued", "started", "finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class State:
    """The names of a code.

    Attributes:
        status: in `JobState` and in sentences.
        rq: RQ's status of the job. Older readers of the wire know an end by it.
        outcome: the label of Prometheus, and the event of the log.
        http: the status of an answer.
        exit: the exit code of a command that waits for the job.
        retry: whether RQ's ``Retry`` applies.
        said: the sentence of an end that has none.
    """

    status: Status
    rq: Literal["finished", "failed", "stopped"]
    outcome: str
    http: int
    exit: int = 1
    retry: bool = False
    said: str = ""

    @property
    def refused(self) -> bool:
        """Whether another try fails too, unless the request changes."""
        return self.outcome == "refused"

    @property
    def type(self) -> Literal["done", "failed", "cancelled"]:
        """Of the event, as every version of the wire knows it."""
        return _TYPES[self.rq]


_TYPES: dict[str, Literal["done", "failed", "cancelled"]] = {
    "finished": "done",
    "failed": "failed",
    "stopped": "cancelled",
}

STATES = {
    "finished": State("finished", "finished", "finished", 200, exit=0),
    "failed": State(
        *("failed", "failed", "failed", 500), retry=True, said="the job failed without a reason"
    ),
    # Workers died while they ran it.
    "quarantined": State("failed", "failed", "failed", 500),
    "expired": State("failed", "failed", "expired", 500),
    "invalid_request": State("failed", "failed", "refused", 400),
    "cancelled": State("cancelled", "stopped", "cancelled", 409, said="the job was cancelled"),
    # Of rows that get no job.
    "unparsable": State("failed", "failed", "refused", 400),
    "duplicate_custom_id": State("failed", "failed", "refused", 400),
    "model_not_found": State("failed", "failed", "failed", 404),
}
"""By code."""

ENDED = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "cancelled",
    "canceled": "cancelled",
}
"""RQ's statuses of ended jobs, each with the code of an end that says no more."""


@dataclass(frozen=True, slots=True)
class End:
    """How a job has ended: with an answer, or why without one.

    Attributes:
        code: of `STATES`.
        sentence: what went wrong; "" with an answer.
        field: the path to what is refused in the request; "" of anything else.
        remedy: what to do about it; "" if the sentence says it.
        body: the answer, an OpenAI response body.

    >>> print(End("invalid_request", "got 9", "temperature", "give a number from 0 to 2"))
    temperature: got 9; give a number from 0 to 2
    """

    code: str = "finished"
    sentence: str = ""
    field: str = ""
    remedy: str = ""
    body: Any = None

    @classmethod
    def refusing(cls, error: InvalidRequest) -> Self:
        """The end of a job whose request can never be served."""
        got, remedy = one_line(error.got), one_line(error.remedy)
        return cls("invalid_request", got, error.field or "", remedy)

    @classmethod
    def failing(cls, sentence: str) -> Self:
        """The end of a job that went wrong, in a sentence that may have line ends."""
        return cls("failed", one_line(sentence))

    @classmethod
    def read(cls, usual: str, code: str, told: str, field: str, remedy: str) -> Self:
        """An end without an answer, from its parts as they travel.

        Args:
            usual: the code to take in place of none, or of one that only a newer version knows.
            told: the whole sentence, as ``str`` makes it.
        """
        if code not in STATES or STATES[code].rq != STATES[usual].rq:
            code = usual
        sentence = told.removeprefix(f"{field}: ") if field else told
        return cls(code, sentence.removesuffix(f"; {remedy}"), field, remedy)

    def __str__(self) -> str:
        return spelled(self.field, self.sentence, self.remedy)

    @property
    def state(self) -> State:
        return STATES[self.code]

    @property
    def ok(self) -> bool:
        return self.code == "finished"

    def error(self, job_id: str) -> JobError:
        """What a program raises for an end without an answer."""
        kind = JobCancelled if self.state.rq == "stopped" else JobFailed
        return kind(job_id, self.sentence, self.code, self.field, self.remedy)
