"""The ending of a job, and the outcome of its commit."""

from __future__ import annotations

import json
import logging
import zlib
from base64 import b64encode
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Self

from rq.defaults import DEFAULT_FAILURE_TTL, DEFAULT_RESULT_TTL

from omlx_producer.bulk.row import BatchRow, RowResult, write_line
from omlx_producer.outage import passes
from omlx_producer.wire import End, EndEvent, GenerationRequest
from omlx_worker.queue.unfit import unfit

log = logging.getLogger("omlx_worker.queue.lease")

CANCELLED_WHILE_IT_RAN = End("cancelled", "the job was cancelled while it ran")


@dataclass(frozen=True)
class Ending:
    """What the end of a job writes.

    Attributes:
        event: the last one. Its error is the result of a job that did not finish.
        result: the response body of a finished job.
        published: tokens that the stream must hold.
        row_body: the body in the output line of a batch's row, if it is not the result.
    """

    event: EndEvent
    result: dict[str, Any] | None = None
    published: int = 0
    row_body: dict[str, Any] | None = None

    @cached_property
    def end(self) -> End:
        return self.event.end

    @property
    def unquoted(self) -> str:
        """What its sentence says without a quote of the request: a field, or our own words.

        Names of unknown fields are the request's.
        """
        field = self.event.field
        if not field:
            return self.event.error.partition(": ")[0]
        known = field.partition(".")[0].partition("[")[0]
        return known if known in GenerationRequest.model_fields else "the request"

    @cached_property
    def payload(self) -> str:
        """The result as `rq.results.Result` stores it."""
        if self.end.ok:
            return b64encode(json.dumps(self.result).encode()).decode()
        return b64encode(zlib.compress(self.event.error.encode())).decode()

    def fields(self, row: BatchRow | None) -> tuple[str | int | bytes, ...]:
        """The arguments of commit.lua after the lease.

        Args:
            row: the row of a batch whose job ends.
        """
        state = self.end.state
        return (
            "retry" if state.retry else state.rq,
            self.payload,
            DEFAULT_RESULT_TTL if self.end.ok else DEFAULT_FAILURE_TTL,
            self.event.stream_id,
            self.event.model_dump_json(),
            self.published,
            *self._of_row(row),
        )

    def _of_row(self, row: BatchRow | None) -> tuple[str, int | str, bytes | str, str]:
        """What a batch gets: run, row, output line and counts."""
        if row is None:
            return "", "", "", ""
        event, body = self.event, self.row_body or self.result
        result = RowResult(row, event.job_id, body, event.code, event.error, event.field)
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
