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

import difflib
import reprlib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omlx_producer.terminal import counted

LONGEST_SENTENCE = 1000
LONGEST_PATH = 150

# The fields of requests that may be given under another name.
_OTHER_NAMES: dict[int | str, str] = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}

_SHORT = reprlib.Repr()
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
    """A request that can never be served. The message names field, value and remedy.

    >>> try:
    ...     producer.submit(prompt="def f(x):", temperature=9)
    ... except InvalidRequest as error:
    ...     print(error)
    temperature: got 9; give a number from 0 to 2
    """


class ModelNotFound(InvalidRequest):
    """No worker has announced the model. The request can be served once one has.

    >>> try:
    ...     producer.submit(model="asleep", prompt="def f(x):")
    ... except ModelNotFound:
    ...     print("start a worker")
    start a worker
    """


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

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     text = job.result().text
    ... except JobError as error:
    ...     text = f"job {error.job_id}: {error}"
    """

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobError):
    """The job failed; the message says why.

    Attributes:
        code: ``invalid_request`` if another try would fail too, ``expired`` after its completion
            window, else ``failed``.

    >>> job = producer.submit(prompt="def f(x):")
    >>> try:
    ...     text = job.result().text
    ... except JobFailed as error:
    ...     text = f"{error.code}: {error}"
    """

    def __init__(self, job_id: str, message: str, code: str = "failed") -> None:
        super().__init__(job_id, message)
        self.code = code


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


def one_line(text: str) -> str:
    """A sentence that can be stored and shown, whatever it quotes."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 3] + "..."


def unquoted(error: Exception) -> Exception:
    """An error for a log: its type and stack without its message, which may quote a prompt."""
    return Exception(type(error).__name__).with_traceback(error.__traceback__)


def describe(error: ValidationError, model: type[BaseModel], data: Any, whole: str) -> str:
    """The first problem of a validation error as one sentence: field, value, remedy.

    Every field of the model must have a ``description`` that says what it should hold.

    Args:
        error: raised while ``data`` was validated.
        data: the input; says which name it uses for a field that has two.
        whole: what ``data`` should be.
    """
    problems = [(problem, _path(problem)) for problem in error.errors(include_url=False)]
    first = problems[0][1][:1]
    # A union reports every branch that failed; the user meant the deepest.
    problem, path = max((p for p in problems if p[1][:1] == first), key=lambda p: len(p[1]))
    if problem["type"] == "value_error":
        sentence = problem["msg"].removeprefix("Value error, ")
        if not path:
            return sentence
        # The sentence begins with a field inside of the path, or is about the path itself.
        return _spell(path) + (": " if sentence.startswith("got ") else ".") + sentence
    if not path:
        return f"request: got {shown(problem['input'])}; give {whole}"
    owner, expected = _look_up(model, path)
    other = _OTHER_NAMES.get(path[0]) if len(path) == 1 else None
    where = other if other and data.get(path[0]) is None else _spell(path)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), owner.model_fields, n=1)
        return f"{where}: unknown field; " + (f"did you mean {near[0]}?" if near else "remove it")
    if problem["type"] == "missing":
        return f"{where}: missing; give {expected}"
    if problem["type"] == "string_unicode":
        expected = "text without lone surrogates, which are no characters"
    found = shown(problem["input"])
    if problem["type"] == "string_too_long":
        found = counted(len(problem["input"]), "character")
    return f"{where}: got {found}; give {expected}"


def shown(value: Any) -> str:
    """A value as a sentence quotes it, shortened."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        # Python does not write out integers of thousands of digits.
        return "a huge whole number"


def _path(problem: ErrorDetails) -> list[int | str]:
    """The path to a problem: fields, keys and indices, without the branches of unions."""
    return [part for part in problem["loc"] if not _is_branch(part)]


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        "[" in part or part in {"str", "constrained-str", "ToolChoice"}
    )


def _look_up(model: type[BaseModel], path: list[int | str]) -> tuple[type[BaseModel], str]:
    """The innermost model along a path, and the description of the innermost known field."""
    expected = ""
    for part in path:
        named = {field.alias or name: field for name, field in model.model_fields.items()}
        field = named.get(str(part))
        if field is None:
            continue
        expected = field.description or ""
        model = next(_models_in(field.annotation), model)
    return model, expected


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _spell(path: list[int | str]) -> str:
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            name = part if part.isidentifier() and len(part) <= 60 else _SHORT.repr(part)
            spelled += f".{name}" if spelled else name
    return spelled if len(spelled) <= LONGEST_PATH else spelled[:LONGEST_PATH] + "..."
