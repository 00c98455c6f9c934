"""Makes a claimed job ready to run: validate its request, tokenize, resume its stream."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

from pydantic import ValidationError
from redis import Redis
from rq.job import Job

from omlx_producer.errors import unquoted
from omlx_producer.wire import (
    LOOPS,
    PICTURE_LOOPS,
    End,
    GenerationRequest,
    InvalidRequest,
    TokensEvent,
    events_key,
    parse_event,
)
from omlx_worker.control.payload import decode_request
from omlx_worker.engine.rows.interface import Engine
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Size
from omlx_worker.job import ActiveJob, OtherModel
from omlx_worker.queue.claim import MAX_BODY_BYTES, Claim
from omlx_worker.queue.ending import CANCELLED_WHILE_IT_RAN
from omlx_worker.queue.quarantine import LONE_DEATHS

log = logging.getLogger("omlx_worker.control.intake")

# A compressed payload of this size may unpack to 32 MiB.
LARGE_BYTES = 32 * 2**10
UNSUPPORTED = (
    "{}: workers of omlx-queue call no callbacks and webhooks, repeat and chain no jobs, and "
    "keep no rate limits; leave it out, and follow the ends of jobs as examples/after_each_job.py "
    "does"
)
# Entries of a stream that are read at once. One with log-probabilities may have 50 KiB.
PAGE = 100
CONVICTED = (
    f"the job's worker died {{}} times while it ran, {LONE_DEATHS} times with no other job; "
    "the job is taken for the cause and does not run again"
)


class Intake:
    """Prepares jobs for one engine under one alias. Safe to use from several threads.

    Args:
        objection: why rows of these sizes can never run here; None if they can.
    """

    def __init__(
        self,
        engine: Engine,
        model_alias: str,
        connection: Redis,
        objection: Callable[[Sequence[Size]], InvalidRequest | None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._model_alias = model_alias
        self._connection = connection
        self._objection = objection

    def prepare(self, claim: Claim) -> ActiveJob | End:
        """Make a job ready to run, or say why it cannot."""
        if claim.treatment == "stop":
            return CANCELLED_WHILE_IT_RAN
        if claim.unsupported:
            return End("invalid_request", UNSUPPORTED.format(claim.unsupported))
        if claim.treatment == "fail":
            return End("quarantined", CONVICTED.format(claim.deaths))
        try:
            if claim.data_bytes > MAX_BODY_BYTES:
                raise InvalidRequest(
                    None,
                    f"the job's payload is {claim.data_bytes} bytes long; "
                    f"at most {MAX_BODY_BYTES} are read",
                )
            request = decode_request(claim.data, self._model_alias)
            rows = self._engine.prepare(request, claim.id)
        except InvalidRequest as error:
            return End.refusing(error)
        except TimeoutError as error:
            return End("failed", str(error))
        except Exception as error:
            log.error("job %s could not be prepared", claim.id, exc_info=unquoted(error))
            sentence = f"the job could not be prepared: {type(error).__name__}: {error}"
            return End.failing(sentence)
        finally:
            claim.data = b""
            if claim.data_bytes > LARGE_BYTES:
                release_memory()
        if request.max_completion_tokens is None:
            rows = self._within_memory(rows)
            free = request.constraint is None and request.calling is None
            if claim.row and free and request.repetition_detection is None:
                loops = PICTURE_LOOPS if request.pictures else LOOPS
                rows = [replace(row, repetition=loops) for row in rows]
        sizes = _sizes(rows)
        if objection := self._objection(sizes):
            return End.refusing(objection)
        if request.window_seconds is not None:
            claim.expires_in = request.window_seconds - self._age(claim)
            if late := claim.timed_out:
                return late
        return self._resumed(claim, request, rows)

    def _within_memory(self, rows: list[RowRequest]) -> list[RowRequest]:
        """Halve the default limit of rows until memory allows for it."""
        while rows[0].max_tokens > 1 and self._objection(_sizes(rows)):
            rows = [replace(row, max_tokens=row.max_tokens // 2) for row in rows]
        return rows

    def _age(self, claim: Claim) -> float:
        """Seconds from a job's creation to its claim; 0 if its hash does not say."""
        created: Any = self._connection.hget(Job.key_for(claim.id), "created_at")
        try:
            return claim.started_at - datetime.fromisoformat(created.decode()).timestamp()
        except (AttributeError, ValueError, OverflowError):
            return 0.0

    def _resumed(
        self, claim: Claim, request: GenerationRequest, rows: list[RowRequest]
    ) -> ActiveJob:
        """The job, with the tokens that an interrupted run left in its stream.

        Without them if they cannot be used; see `LeaseTable.start_over`.
        """
        streams = claim.priority != "bulk" if request.stream is None else request.stream
        fingerprint = self._engine.info.system_fingerprint
        new = partial(ActiveJob, claim, request, rows, streams=streams, fingerprint=fingerprint)
        if not claim.streamed:
            return new()
        key = events_key(claim.id)
        try:
            job = new()
            job.resume(self._streamed(key), self._engine.text_of)
            return job
        except OtherModel:
            reason = "another model has written it"
        except (ValidationError, ValueError, KeyError, IndexError) as error:
            # Not the error itself: it may quote the text.
            reason = type(error).__name__
        log.warning("cannot resume the stream of job %s (%s); starting over", claim.id, reason)
        return new()

    def _streamed(self, key: str) -> Iterator[TokensEvent]:
        """The events of an interrupted run, read a page at a time: streams may be large."""
        start = "-"
        entries: Any = None
        while entries is None or len(entries) == PAGE:
            entries = self._connection.xrange(key, min=start, count=PAGE)
            for entry_id, fields in entries:
                start = f"({entry_id.decode()}"
                if isinstance(event := parse_event(fields[b"event"]), TokensEvent):
                    yield event


def _sizes(rows: Sequence[RowRequest]) -> tuple[Size, ...]:
    return tuple(row.size(len(row.prompt)) for row in rows)


def release_memory() -> None:
    """Return freed memory to the system; glibc would keep it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
