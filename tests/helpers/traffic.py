"""The traffic thread by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest
from queue import SimpleQueue
from typing import Any, Self

from omlx_producer.wire import GenerationRequest
from omlx_worker.delivery.job_log import JobLog
from omlx_worker.delivery.observers import Observers
from omlx_worker.delivery.outbox import Outbox
from omlx_worker.delivery.publisher import Publisher
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.messages import Admit, Stepped, Stop
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.fake_engine import FakeEngine


class Traffic:
    """A traffic thread at work for jobs that are held, without an engine and without a main
    thread, both of which would ask Redis for things of their own.

    Attributes:
        jobs: those that `step` gives tokens.
    """

    def __init__(self, leases: LeaseTable, held: Sequence[Claim], *, streams: bool = True) -> None:
        self.leases = leases
        self.jobs = [_active(job, streams) for job in held]
        self.mailbox: SimpleQueue[Any] = SimpleQueue()
        self.outbox = Outbox()
        self.observers = Observers(JobLog())
        self.publisher = Publisher(
            leases, self.mailbox, SimpleQueue(), lambda _: None, self.outbox, self.observers
        )

    def __enter__(self) -> Self:
        self.mailbox.put(Admit(self.jobs))
        self.publisher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.mailbox.put(Stop())
        assert self.publisher.join(20)

    def step(self, reason: Any = None, *, tokens: int = 1, texts: Sequence[str] = ()) -> None:
        """Report tokens of every row, and wait until they are written.

        Args:
            texts: of the first rows; others have a letter a token.
        """
        rows = [row for job in self.jobs for row in job.rows]
        new = [7] * tokens
        for row in rows:
            row.tokens += new
        emissions = [
            Emission(row.row_id, new, text or "x" * tokens, finish_reason=reason)
            for row, text in zip_longest(rows, texts)
        ]
        self.outbox.add(emissions)
        self.mailbox.put(Stepped(emissions))
        self.wait()

    def wait(self) -> None:
        """Until the thread has written all that it was given."""
        deadline = time.monotonic() + 20
        while self.outbox.waiting:
            assert time.monotonic() < deadline
            time.sleep(0.0005)


def _active(job: Claim, streams: bool) -> ActiveJob:
    request = GenerationRequest(model="fake", prompt="hello", max_completion_tokens=100)
    return ActiveJob(job, request, FakeEngine().prepare(request, job.id), streams=streams)
