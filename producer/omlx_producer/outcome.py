"""How a job ended, from the status and the result that RQ keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from rq.job import Job
from rq.results import Result
from rq.serializers import JSONSerializer

from omlx_producer.errors import JobCancelled, JobFailed, UnknownJob
from omlx_producer.events import CancelledEvent, DoneEvent, FailedEvent, TerminalEvent, Usage

Ending = Literal["finished", "failed", "cancelled"]
ResultEntry = tuple[bytes, Mapping[bytes, bytes]]

# RQ's words for a job that is over, and ours.
ENDINGS: dict[str, Ending] = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "cancelled",
    "canceled": "cancelled",
}
_NO_REASON: dict[Ending, str] = {
    "finished": "",
    "failed": "the job failed, and no reason was noted",
    "cancelled": "the job was cancelled",
}


def unknown_job(job_id: str) -> UnknownJob:
    return UnknownJob(f"no job has the id {job_id!r}: check the id, or its result has expired")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job: an OpenAI response body, or one sentence that says why there is none."""

    job_id: str
    ending: Ending
    body: Any = None
    error: str = ""

    def unwrap(self) -> dict[str, Any]:
        """The response body.

        Raises:
            JobFailed: if the job failed.
            JobCancelled: if it was cancelled or stopped.
            UnknownJob: if the body is none.
        """
        if self.ending == "failed":
            raise JobFailed(self.job_id, self.error)
        if self.ending == "cancelled":
            raise JobCancelled(self.job_id, self.error)
        if not isinstance(self.body, dict):
            raise self._foreign()
        return self.body

    def as_event(self, cursor: int) -> TerminalEvent:
        """The terminal event that says the same, for a stream that has none.

        Args:
            cursor: how many tokens the consumer has had.
        """
        if self.ending == "failed":
            return FailedEvent(job_id=self.job_id, n=cursor, error=self.error)
        if self.ending == "cancelled":
            return CancelledEvent(job_id=self.job_id, n=cursor, error=self.error)
        try:
            usage = Usage.model_validate(self.body["usage"])
            return DoneEvent(
                job_id=self.job_id,
                n=max(cursor, usage.completion_tokens),
                finish_reasons=[choice["finish_reason"] for choice in self.body["choices"]],
                usage=usage,
            )
        except (KeyError, TypeError, ValidationError):
            raise self._foreign() from None

    def _foreign(self) -> UnknownJob:
        return UnknownJob(f"job {self.job_id} is no generation job: its result is of another kind")


def results_key(job_id: str) -> str:
    """The stream in which RQ keeps the results of a job."""
    return str(Result.get_key(job_id))  # type: ignore[no-untyped-call]


def ask_result(pipe: Any, job_id: str) -> Any:
    """Queue the reading of a job's status and last result, at one moment, on a pipeline.

    Args:
        pipe: a sync or async pipeline of redis-py.

    Returns:
        The pipeline; executed, it gives the status or None, and a list of at most one entry.
    """
    pipe.hget(Job.key_for(job_id), "status")
    pipe.xrevrange(results_key(job_id), count=1)
    return pipe


def read_outcome(job_id: str, ending: Ending, entry: ResultEntry | None) -> Outcome:
    """Read the last entry of the results stream of a job that is over.

    Raises:
        UnknownJob: if the job finished, but its result has expired or is of another kind.
    """
    if entry is None:
        if ending == "finished":
            raise unknown_job(job_id)
        return Outcome(job_id, ending, error=_NO_REASON[ending])
    entry_id, payload = entry
    restore: Any = Result.restore
    try:
        result = restore(job_id, entry_id.decode(), payload, None, serializer=JSONSerializer)
    except ValueError:
        # A pickled return value, which is never read.
        raise UnknownJob(f"job {job_id} is no generation job: its result is not JSON") from None
    lines = (result.exc_string or "").strip().splitlines() or [_NO_REASON[ending]]
    return Outcome(job_id, ending, body=result.return_value, error=lines[-1])
