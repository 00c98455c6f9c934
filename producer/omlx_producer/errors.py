"""What can go wrong, as exceptions whose messages are one sentence for the user.

* OmlxQueueError
  · InvalidRequest        also a ValueError: this request can never be served
  · UnknownJob            also a LookupError: no such job, or it has expired
  · TokensLost            the stream no longer holds the tokens after the cursor
  · JobError              the job is over and has no result
    · JobFailed
    · JobCancelled
  · JobTimeout            also a TimeoutError: the job goes on, the waiting ended

Trouble with Redis itself is left as redis-py's own ``redis.exceptions.RedisError``.
"""

from __future__ import annotations


class OmlxQueueError(Exception):
    """The base of every exception of this package."""


class InvalidRequest(OmlxQueueError, ValueError):
    """A request that can never be served. The message names the field, the value, the remedy."""


class UnknownJob(OmlxQueueError, LookupError):
    """No job has this id, or the job and its result have expired."""


class TokensLost(OmlxQueueError):
    """Tokens after the cursor have left the stream; the job's result still has the whole text.

    Attributes:
        cursor: where the tokens that are still there begin; a stream can be opened from it.
    """

    def __init__(self, message: str, cursor: int) -> None:
        super().__init__(message)
        self.cursor = cursor


class JobError(OmlxQueueError):
    """A job that is over and has no result."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobError):
    """The job failed; the message says why."""


class JobCancelled(JobError):
    """The job was cancelled or stopped; the message says by what."""


class JobTimeout(OmlxQueueError, TimeoutError):
    """The job had not finished when the time for waiting was over; it goes on."""
