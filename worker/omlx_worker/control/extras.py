"""Calls that jobs do not need: the worker's record, its figures, RQ's maintenance."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import ResponseError

from omlx_producer.outage import passes
from omlx_worker.queue.unfit import says_cluster

log = logging.getLogger("omlx_worker.worker")


class Extras:
    """Skips what Redis refuses and logs it once: a key is of another type, or a right is missing.

    Errors that pass are raised, and those of a cluster, where nothing works.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        try:
            yield
        except ResponseError as error:
            if passes(error) or says_cluster(error):
                raise
            if what not in self._refused:
                log.error(
                    "Redis refuses %s (%s), and jobs run without it; delete the key if it is of "
                    "another type, or grant the right",
                    what,
                    error,
                )
            self._refused.add(what)
