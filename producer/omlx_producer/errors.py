"""The exceptions of this package. Each message is one sentence for the user.

* OmlxQueueError
  · InvalidRequest        also a ValueError: this request cannot be served
    · ModelNotFound       until a worker announces its model
  · UnsuitableRedis       this server would lose jobs, or cannot hold any
  · UnknownJob            also a LookupError: no such job, or it has expired
  · TokensLost            the stream has lost tokens, or was written again
  · JobError              the job is over and has no result
    · JobFailed
    · JobCancelled
    · MalformedResult     its result in Redis is not that of a generation job; or a batch is broken
  · JobTimeout            also a TimeoutError: the wait ended, the job goes on

Errors of Redis itself stay redis-py's ``redis.exceptions.RedisError``.
"""

from __future__ import annotations

import reprlib
from typing import Any

LONGEST_SENTENCE = 1000


class _Short(reprlib.Repr):
    """Leaves out what a data URL holds."""

    def repr_str(self, x: str, level: int) -> str:
        if x.lstrip().startswith("data:"):
            x = x[: self.maxstring].partition(",")[0] + ",..."
        return super().repr_str(x, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2


class OmlxQueueError(Exception):
    """The base of every exception of this package.

    >>> try:
    ...     producer.result("no-such-job")
    ... except OmlxQueueError as error:
    ...     print(error)
    no job has the id 'no-such-job': check the id, or its result has expired
    """


class InvalidRequest(OmlxQueueError, ValueError):
    """A request that cannot be served as it is. The message names field, value and remedy.

    Attributes:
        field: the path to what is wrong, such as ``messages[0].content``; None if no field is.
        got: what is wrong with it.
        remedy: what to give instead; "" if ``got`` says it.
        index: the number of the request, of several that were submitted together.

    >>> try:
    ...     producer.submit(prompt="def f(x):", temperature=9)
    ... except InvalidRequest as error:
    ...     print(f"{error} ({error.field})")
    temperature: got 9; give a number from 0 to 2 (temperature)
    """

    index: int | None = None

    def __init__(self, field: str | None, got: str, remedy: str = "") -> None:
        super().__init__(field, got, remedy)
        self.field, self.got, self.remedy = field, got, remedy

    def __str__(self) -> str:
        return self.told(self.field)

    def told(self, field: str | None) -> str:
        """The sentence with another name for the field."""
        where = "" if self.index is None else f"request {self.index}: "
        return where + spelled(field, self.got, self.remedy)


class ModelNotFound(InvalidRequest):
    """No worker has announced the model. The request can be served once one has.

    Attributes:
        anyway: whether ``require_known_model=False`` enqueues it before that.

    >>> try:
    ...     producer.submit(model="asleep", prompt="def f(x):")
    ... except ModelNotFound:
    ...     print("start a worker")
    start a worker
    """

    anyway = False

    def __str__(self) -> str:
        return super().__str__() + (", or pass require_known_model=False" if self.anyway else "")


class UnsuitableRedis(OmlxQueueError):
    """The server would lose jobs, or cannot hold any; the message says what to do.

    >>> try:
    ...     job = producer.submit(prompt="def f(x):")
    ... except UnsuitableRedis as error:
    ...     print(error)
    """


class UnknownJob(OmlxQueueError, LookupError):
    """No job has this id, or the job and its result have expired.

    >>> try:
    ...     producer.status("no-such-job")
    ... except UnknownJob:
    ...     print("submit it again")
    submit it again
    """


class TokensLost(OmlxQueueError):
    """The stream has lost tokens, or was written again; the job's result has the whole text.

    Attributes:
        cursor: where a stream can start: after the lost tokens, or 0 if all tokens must be read
            again.

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     events = list(job.stream())
    ... except TokensLost as lost:
    ...     events = list(job.stream(lost.cursor))
    """

    def __init__(self, message: str, cursor: int) -> None:
        super().__init__(message)
        self.cursor = cursor


class JobError(OmlxQueueError):
    """The job is over and has no result.

    Attributes:
        code: ``invalid_request`` if another try would fail too, ``expired`` after its completion
            window, ``quarantined`` if workers died while they ran it, ``cancelled``, or ``failed``.
        sentence: what went wrong.
        field: the path to what a worker refuses in the request; "" of anything else.
        remedy: what to do about it; "" if the sentence says it.

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     text = job.result().text
    ... except JobError as error:
    ...     text = f"job {error.job_id}: {error}"
    """

    code = "failed"

    def __init__(
        self, job_id: str, sentence: str, code: str = "", field: str = "", remedy: str = ""
    ) -> None:
        super().__init__(spelled(field, sentence, remedy))
        self.job_id = job_id
        self.code = code or self.code
        self.sentence, self.field, self.remedy = sentence, field, remedy


class JobFailed(JobError):
    """The job failed; the message says why.

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     text = job.result().text
    ... except JobFailed as error:
    ...     text = f"{error.code}: {error}"
    """


class JobCancelled(JobError):
    """The job was cancelled or stopped; the message says why.

    >>> job = producer.submit(model="asleep", prompt="x", require_known_model=False)
    >>> job.cancel()
    'cancelled'
    >>> try:
    ...     job.result()
    ... except JobCancelled as error:
    ...     print(error)
    the job was cancelled before a worker took it
    """

    code = "cancelled"


class MalformedResult(JobError):
    """The job finished, but its result is not a response body; the message says what is wrong.

    Or a batch has a field in Redis that cannot be read.

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     text = job.result().text
    ... except MalformedResult as error:
    ...     text = str(error)
    """


class JobTimeout(OmlxQueueError, TimeoutError):
    """The job did not finish within the timeout; it goes on.

    >>> job = producer.submit(model="asleep", prompt="x", require_known_model=False)
    >>> try:
    ...     job.result(timeout=0.1)
    ... except JobTimeout:
    ...     print(job.state().status)
    queued
    """


def spelled(field: str | None, sentence: str, remedy: str) -> str:
    """Field, value and remedy as one sentence."""
    where = f"{field}: " if field else ""
    return where + "; ".join(filter(None, (sentence, remedy)))


def one_line(text: str) -> str:
    """A sentence that can be stored and shown, whatever it quotes."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 3] + "..."


def unquoted(error: Exception) -> Exception:
    """An error for a log: its type and stack without its message, which may quote a prompt."""
    return Exception(type(error).__name__).with_traceback(error.__traceback__)


def shown(value: Any) -> str:
    """A value as a sentence quotes it, shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # Python does not write out integers of thousands of digits.
        return "a huge whole number"
