"""The Python API: submit jobs, stream them, wait for them, cancel them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import redis
from rq import Queue
from rq.serializers import JSONSerializer

from omlx_producer.client.cancel import CancelOutcome, cancel_job
from omlx_producer.client.enqueue import (
    CHUNK,
    FAILURE_SECONDS,
    JOB_SECONDS,
    RESULT_SECONDS,
    JobTimes,
    NewJob,
    enqueue,
    require_free_keys,
)
from omlx_producer.client.fields import RequestFields
from omlx_producer.client.models import Fields, check, read_models
from omlx_producer.client.outcome import (
    JobState,
    read_state,
)
from omlx_producer.client.result import wait_for_end
from omlx_producer.client.stream import RECONNECT_SECONDS, FirstText, TokenStream
from omlx_producer.connection import (
    connect,
    redis_url,
    require_client,
    require_suitable,
)
from omlx_producer.wire import (
    PRIORITIES,
    Completion,
    InvalidRequest,
    ModelInfo,
    Priority,
    embedding_requests,
)

if TYPE_CHECKING:
    from omlx_producer.bulk.library import BatchHandle, BulkArguments, BulkResults, Show


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A submitted job. Another process needs only its id.

    >>> job = producer.submit(prompt="def f(x):", max_completion_tokens=8)
    >>> job.result(timeout=60) == producer.result(job.id)
    True
    """

    id: str
    queue: str
    producer: Producer = field(repr=False, compare=False)

    def stream(self, cursor: int = 0) -> TokenStream:
        """See `Producer.stream`."""
        return self.producer.stream(self.id, cursor)

    def text(self) -> Iterator[str]:
        """The text of its first choice as it is written, without thinking and calls of tools.

        Not for a job with ``echo``, whose prompt is in the result alone.

        >>> job = producer.submit(prompt="def f(x):")
        >>> "".join(job.text()) == job.result().text
        True

        Raises, while iterating: the errors of `Producer.result`, after the text so far; those of
        `TokenStream`.
        """
        text = FirstText()
        with self.stream() as events:
            yield from filter(None, map(text.take, events))
        if rest := text.rest(self.result()):
            yield rest

    def result(self, timeout: float | None = None) -> Completion:
        """See `Producer.result`."""
        return self.producer.result(self.id, timeout)

    def state(self) -> JobState:
        """See `Producer.status`."""
        return self.producer.status(self.id)

    def cancel(self) -> CancelOutcome:
        """See `Producer.cancel`."""
        return self.producer.cancel(self.id)


class Producer:
    """A client of the queue.

    Args:
        connection: a Redis client that returns bytes, or a URL; by default that of
            ``OMLX_QUEUE_REDIS_URL``, else of ``REDIS_URL``.
        allow_eviction: also submit to a server that drops keys when its memory is full, and may
            lose jobs; by default what ``OMLX_QUEUE_ALLOW_EVICTION`` says.

    >>> with Producer() as producer:
    ...     job = producer.submit(prompt="def f(x):", temperature=0)
    ...     text = job.result(timeout=60).text
    """

    def __init__(
        self, connection: redis.Redis | str | None = None, *, allow_eviction: bool | None = None
    ) -> None:
        self._owned = connection is None or isinstance(connection, str)
        if connection is None or isinstance(connection, str):
            connection = connect(redis_url(connection))
        self.connection = connection
        require_client(self.connection)
        self._allow_eviction = allow_eviction
        self._suitable = False
        self._queues: dict[str, Queue] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection if it was made from a URL.

        >>> producer = Producer("redis://127.0.0.1:6379/0")
        >>> producer.close()
        """
        if self._owned:
            self.connection.close()

    def submit(
        self,
        request: Fields | None = None,
        *,
        priority: Priority = "default",
        job_timeout: int = JOB_SECONDS,
        result_ttl: int = RESULT_SECONDS,
        failure_ttl: int = FAILURE_SECONDS,
        require_known_model: bool = True,
        idempotency_key: str | None = None,
        idempotent: bool = False,
        **fields: Unpack[RequestFields],
    ) -> JobHandle:
        """Enqueue one request.

        >>> job = producer.submit(
        ...     messages=[{"role": "user", "content": "Reverse a list."}],
        ...     max_completion_tokens=200,
        ...     priority="bulk",
        ... )
        >>> job.queue
        'omlx:fake:bulk'

        Args:
            request: the request; or give its fields by name. ``model`` may be left out if workers
                serve exactly one.
            priority: which of the model's queues it joins.
            job_timeout: seconds that it may run.
            result_ttl: seconds until its result and its tokens expire.
            failure_ttl: seconds until a failure expires.
            require_known_model: False also takes a model that no worker has announced.
            idempotency_key: a second submission with the same key returns the first job, in
                whatever state it is, until its result expires or it is deleted.
            idempotent: make the key from the request.

        Raises:
            InvalidRequest: names the field, the value and the remedy; nothing was enqueued. It is a
                ModelNotFound if no worker has announced the model.
            UnsuitableRedis: see `require_suitable`.
        """
        if request is not None and fields:
            raise TypeError("give a request or its fields by name, not both")
        (handle,) = self.submit_many(
            [fields if request is None else request],
            priority=priority,
            job_timeout=job_timeout,
            result_ttl=result_ttl,
            failure_ttl=failure_ttl,
            require_known_model=require_known_model,
            idempotency_keys=[idempotency_key],
            idempotent=idempotent,
        )
        return handle

    def submit_many(
        self,
        requests: Iterable[Fields],
        *,
        priority: Priority = "default",
        job_timeout: int = JOB_SECONDS,
        result_ttl: int = RESULT_SECONDS,
        failure_ttl: int = FAILURE_SECONDS,
        require_known_model: bool = True,
        idempotency_keys: Sequence[str | None] | None = None,
        idempotent: bool = False,
    ) -> list[JobHandle]:
        """Enqueue many requests in order, `CHUNK` at a time; see `submit`.

        >>> jobs = producer.submit_many({"prompt": f"# {number}"} for number in range(100))
        >>> len(jobs)
        100

        Args:
            idempotency_keys: one for each request, or None.

        Raises:
            InvalidRequest: for the first invalid request; if more than one was given, its index
                begins the message. Nothing was enqueued. Only if another client takes a key
                meanwhile are earlier chunks enqueued.
            UnsuitableRedis: see `require_suitable`.
        """
        self.require_suitable()
        if priority not in PRIORITIES:
            raise InvalidRequest("priority", f"got {priority!r}", f"give {', '.join(PRIORITIES)}")
        checked = check(list(requests), self.models(), require_known_model=require_known_model)
        keys = [None] * len(checked) if idempotency_keys is None else idempotency_keys
        if len(keys) != len(checked):
            raise InvalidRequest(
                "idempotency_keys",
                f"got {len(keys)}",
                f"give one for each of {len(checked)} requests",
            )
        jobs = [
            NewJob.of(request, priority, key, idempotent)
            for request, key in zip(checked, keys, strict=True)
        ]
        times = JobTimes(job_timeout, result_ttl, failure_ttl)
        if len(jobs) > CHUNK:
            require_free_keys(self.connection, jobs)
        for start in range(0, len(jobs), CHUNK):
            enqueue(self.connection, jobs[start : start + CHUNK], times, self._queue)
        return [JobHandle(job.id, job.queue, self) for job in jobs]

    def embed(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        dimensions: int | None = None,
        priority: Priority = "default",
        timeout: float | None = None,
    ) -> list[array[float]]:
        """The vector of each text, an array of float32, which NumPy takes as it is.

        For a file of texts there is ``omlx-submit embed``, which can be resumed.

        >>> with Producer(vectors_url) as other:
        ...     vectors = other.embed(["a cat", "a dog"])
        >>> [len(vector) for vector in vectors]
        [4, 4]

        Args:
            model: may be left out if workers serve exactly one of embeddings.
            dimensions: numbers of a vector; by default all that it has.
            timeout: see `result`; for each job of up to 64 texts.

        Raises:
            InvalidRequest: see `submit`.
            JobError: see `result`.
        """
        jobs = self.submit_many(embedding_requests(texts, model, dimensions), priority=priority)
        return [vector for job in jobs for vector in job.result(timeout).vectors]

    @overload
    def run(
        self,
        rows: Any,
        out: None = None,
        *,
        ordered: bool = False,
        progress: Show = None,
        **arguments: Unpack[BulkArguments],
    ) -> BulkResults: ...

    @overload
    def run(
        self,
        rows: Any,
        out: str | PathLike[str],
        *,
        ordered: bool = False,
        only_failures: bool = False,
        replace: bool = False,
        progress: Show = None,
        **arguments: Unpack[BulkArguments],
    ) -> Counter[str]: ...

    def run(
        self,
        rows: Any,
        out: str | PathLike[str] | None = None,
        *,
        ordered: bool = False,
        only_failures: bool = False,
        replace: bool = False,
        progress: Show = None,
        **arguments: Unpack[BulkArguments],
    ) -> BulkResults | Counter[str]:
        """Run many rows, as ``omlx-submit run`` does: into files, or as an iterator.

        >>> for result in producer.run(["def f(x):", "class A:"], max_completion_tokens=8):
        ...     print(result.custom_id, result.text)
        row-...
        row-...
        >>> producer.run([{"prompt": "def f(x):"}], output)
        Counter()

        Args:
            rows: the path of a file of requests; or prompts, or dictionaries as the lines of such a
                file have them; or a frame of pandas or polars.
            out: where results go, a name in ``.jsonl``, ``.csv`` or ``.parquet``. The same call
                after a crash goes on where it was. None: the call returns an iterator, and nothing
                can be resumed.
            ordered: results in the order of the rows, in a file or from the iterator, where one is
                held until those before it have come.
            only_failures: run only the rows that failed, as ``omlx-submit retry`` does.
            replace: run with other options than the last time, and keep a copy of that output.
            progress: called with the number of rows that have ended and of all rows, which is None
                if not known; or the name of a style of the command.
            **arguments: see `BulkArguments`.

        Returns:
            With ``out``, how many rows have failed, by code.

        Raises:
            InvalidRequest: if rows, output or options cannot be used; by the iterator, once it is
                read.
            UnsuitableRedis: see `require_suitable`.
            redis.exceptions.RedisError: if Redis was away for too long.
            OSError: if a file cannot be read or written.
            KeyboardInterrupt: after an interrupt of a run into files, which first takes the rows
                that wait out of Redis and waits for those that run. A second one ends it at once.
        """
        from omlx_producer.bulk import library

        if out is None:
            for name, given in (("only_failures", only_failures), ("replace", replace)):
                if given:
                    raise InvalidRequest(name, "given without out", "give out, or leave it out")
            return library.run_through(self, rows, arguments, ordered=ordered, progress=progress)
        if not isinstance(out, str | PathLike):
            raise InvalidRequest("out", f"got {type(out).__name__}", "give a path")
        return library.run_into(
            self,
            rows,
            out,
            arguments,
            ordered=ordered,
            only_failures=only_failures,
            replace=replace,
            progress=progress,
        )

    def batch(self, rows: Any, **arguments: Unpack[BulkArguments]) -> BatchHandle:
        """Leave many rows to the workers, as ``omlx-submit run --detach`` does; see `run`.

        >>> batch = producer.batch(["def f(x):", "class A:"])
        >>> batch.wait(timeout=60).state
        'done'
        """
        from omlx_producer.bulk import library

        return library.run_detached(self, rows, arguments)

    def find_batch(self, batch_id: str) -> BatchHandle:
        """A batch of another process; also one of the command line or of the gateway.

        Its id may begin with ``batch_``, as the gateway has it.

        >>> batch = producer.batch(["def f(x):"])
        >>> producer.find_batch(batch.id) == batch
        True
        """
        from omlx_producer.bulk import library

        if not isinstance(batch_id, str):
            got = f"got {type(batch_id).__name__}"
            raise InvalidRequest("batch_id", got, "give the id of a batch")
        return library.BatchHandle(batch_id, self.connection)

    def require_suitable(self) -> None:
        """Refuse a server that would lose jobs. It is asked once, at the first submission.

        >>> producer.require_suitable()

        Raises:
            UnsuitableRedis: if it drops keys when its memory is full, or cannot hold jobs.
        """
        if not self._suitable:
            require_suitable(self.connection, allow_eviction=self._allow_eviction)
            self._suitable = True

    def stream(
        self, job_id: str, cursor: int = 0, *, reconnect_for: float = RECONNECT_SECONDS
    ) -> TokenStream:
        """Iterate over a job's events from a cursor; see `TokenStream`.

        >>> job = producer.submit(prompt="def f(x):")
        >>> *_, last = producer.stream(job.id)
        >>> last.type
        'done'
        """
        return TokenStream(self.connection, job_id, cursor, reconnect_for=reconnect_for)

    def result(self, job_id: str, timeout: float | None = None) -> Completion:
        """Wait for a job's result, an OpenAI response body.

        A server that goes away meanwhile is waited for as by a stream.

        >>> job = producer.submit(prompt="def f(x):")
        >>> producer.result(job.id, timeout=60).choices[0].text
        '...'

        Args:
            job_id: the job.
            timeout: seconds to wait; None waits for ever, 0 not at all. A server that hangs is
                noticed only by redis-py, which tries again; that takes up to 20 s more.

        Raises:
            JobFailed: if it failed.
            JobCancelled: if it was cancelled or stopped.
            JobTimeout: if the timeout passes first; the job goes on.
            MalformedResult: if its result in Redis is not a response body.
            UnknownJob: if the job does not exist, or its result has expired.
        """
        return wait_for_end(self.connection, job_id, timeout)

    def status(self, job_id: str) -> JobState:
        """The state of a job.

        >>> job = producer.submit(model="asleep", prompt="x", require_known_model=False)
        >>> producer.status(job.id).status
        'queued'

        Raises:
            UnknownJob: if it does not exist.
        """
        return read_state(self.connection, job_id)

    def cancel(self, job_id: str) -> CancelOutcome:
        """Cancel a job that waits, stop one that runs; see `cancel_job`.

        >>> job = producer.submit(model="asleep", prompt="x", require_known_model=False)
        >>> producer.cancel(job.id)
        'cancelled'

        Raises:
            UnknownJob: if it does not exist.
        """
        return cancel_job(self.connection, job_id, keep_for=RESULT_SECONDS)

    def models(self, *, live: bool = False) -> dict[str, ModelInfo]:
        """The models that workers have announced, by alias.

        >>> list(producer.models())
        ['fake']

        Args:
            live: only those that a worker serves now.
        """
        return read_models(self.connection, live=live)

    def _queue(self, name: str) -> Queue:
        # RQ asks the server for its version once per Queue object.
        if name not in self._queues:
            self._queues[name] = Queue(name, connection=self.connection, serializer=JSONSerializer)
        return self._queues[name]
