"""Prepares claimed jobs beside the main thread, which never waits for it.

A long prompt takes seconds to tokenize, a constraint half a second to compile. Claims come through
one mailbox, the best first; what became of them goes to the main thread's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from threading import Thread

from redis.exceptions import RedisError

from omlx_producer.outage import passes
from omlx_worker.engine.rows.interface import PREPARED_AT_ONCE
from omlx_worker.messages import Crashed, GivenBack, MainMailbox, Prepared, Readiness
from omlx_worker.queue.claim import Claim

log = logging.getLogger("omlx_worker.control.preparers")

_LAST = -1


class Preparers:
    """The threads that prepare jobs, `PREPARED_AT_ONCE` at a time.

    Args:
        prepare: see `Intake.prepare`. Called in these threads.
        holds: whether this worker still has a claim; else nothing is done for it.
        main: gets a `Prepared` for each claim, or `Crashed`.
    """

    def __init__(
        self,
        prepare: Callable[[Claim], Readiness],
        holds: Callable[[Claim], bool],
        main: MainMailbox,
    ) -> None:
        self._prepare = prepare
        self._holds = holds
        self._main = main
        self._mailbox: PriorityQueue[tuple[int, int, Claim | None]] = PriorityQueue()
        self._numbers = count()
        self._threads = [
            Thread(target=self._run, name="omlx-prepare", daemon=True)
            for _ in range(PREPARED_AT_ONCE)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, claim: Claim, rank: int) -> None:
        """Prepare a job after those of lower ranks, and after earlier ones of its own."""
        self._mailbox.put((rank, next(self._numbers), claim))

    def close(self) -> None:
        """End the threads once they are done with what they do; the rest is not prepared."""
        for _ in self._threads:
            self._mailbox.put((_LAST, next(self._numbers), None))

    def join(self, seconds: float) -> None:
        """Wait for the end of the threads, at most this long."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (claim := self._mailbox.get()[2]) is not None:
            try:
                if self._holds(claim):
                    self._main.put(Prepared(claim, self._outcome(claim)))
            except Exception as error:  # noqa: BLE001 (the main thread raises it)
                self._main.put(Crashed(error))
                return

    def _outcome(self, claim: Claim) -> Readiness:
        try:
            return self._prepare(claim)
        except RedisError as error:
            if not passes(error):
                raise
            log.warning("the keys of job %s cannot be read: %s", claim.id, error)
            return GivenBack()
