"""The ending of a job, and the outcome of its commit."""

from __future__ import annotations

import json
import logging
import zlib
from base64 import b64encode
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Self

from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL

from omlx_producer.bulk.row import BatchRow, RowResult, write_line
from omlx_producer.client.outcome import ENDINGS, Outcome
from omlx_producer.outage import passes
from omlx_producer.wire import GenerationRequest, TerminalEvent
from omlx_worker.queue.unfit import unfit

log = logging.getLogger("omlx_worker.queue.lease")

CANCELLED_WHILE_IT_RAN = "the job was cancelled while it ran"


@dataclass(frozen=True)
class Ending:
    """The ending of a job.

    Attributes:
        status: RQ's: finished, failed or stopped.
        event: the terminal event. Its error is the result of a job that did not finish.
        result: the response body of a finished job.
        retry: whether RQ's ``Retry`` may apply to a failure.
        published: tokens that the stream must hold.
        row_body: the body in the output line of a batch's row, if it is not the result.
    """

    status: str
    event: TerminalEvent
    result: dict[str, Any] | None = None
    retry: bool = True
    published: int = 0
    row_body: dict[str, Any] | None = None

    @property
    def sentence(self) -> str:
        return getattr(self.event, "error", "")

    @property
    def field(self) -> str:
        return getattr(self.event, "field", "")

    @property
    def unquoted(self) -> str:
        """What the sentence says without a quote of the request: a field, or our own words.

        Names of unknown fields are the request's.
        """
        if not self.field:
            return self.sentence.partition(": ")[0]
        known = self.field.partition(".")[0].partition("[")[0]
        return known if known in GenerationRequest.model_fields else "the request"

    @cached_property
    def payload(self) -> str:
        """The result as `rq.results.Result` stores it."""
        if self.status == "finished":
            return b64encode(json.dumps(self.result).encode()).decode()
        return b64encode(zlib.compress(self.sentence.encode())).decode()

    def fields(self, row: BatchRow | None) -> tuple[str | int | bytes, ...]:
        """The arguments of commit.lua after the lease.

        Args:
            row: the row of a batch whose job ends.
        """
        ttl = DEFAULT_RESULT_TTL if self.status == "finished" else DEFAULT_FAILURE_TTL
        return (
            "retry" if self.status == "failed" and self.retry else self.status,
            self.payload,
            ttl,
            self.event.stream_id,
            self.event.model_dump_json(),
            self.published,
            *self._of_row(row),
        )

    def _of_row(self, row: BatchRow | None) -> tuple[str, int | str, bytes | str, str]:
        """What a batch gets: run, row, output line and counts."""
        if row is None:
            return "", "", "", ""
        kind = ENDINGS[self.status]
        code = getattr(self.event, "code", "")
        outcome = Outcome(self.event.job_id, kind, self.result, self.sentence, code, self.field)
        result = RowResult.of_job(row, outcome)
        if self.row_body is not None:
            result = replace(result, body=self.row_body)
        counts = {"ok" if result.ok else f"failed:{result.code}": 1} | asdict(result.usage)
        line = zlib.compress(write_line(result))
        return row.run, row.row, line, " ".join(f"{name}={n}" for name, n in counts.items())


class Commit(IntEnum):
    """The outcome of a commit. The values are commit.lua's."""

    LOST = 0
    DONE = 1
    BEHIND = 2
    RETRIED = 3
    # Not commit.lua's: Redis refuses the call because of a value in this job's keys.
    UNWRITTEN = 4

    @classmethod
    def of(cls, reply: Any) -> Self:
        """Parse a reply of commit.lua. Raises an error that passes or concerns every job."""
        if not isinstance(reply, Exception):
            return cls(reply)
        if passes(reply) or unfit(reply):
            raise reply
        log.error("Redis refuses to end a job: %s", reply)
        return cls(cls.UNWRITTEN)
