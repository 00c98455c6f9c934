"""A run whose results go to the program that reads them, not into files."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from redis.exceptions import RedisError

from omlx_producer.bulk.driver import Check, Driver
from omlx_producer.bulk.given import Given
from omlx_producer.bulk.input import Client, Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.progress import Show
from omlx_producer.bulk.row import BadRow, Row, RowResult
from omlx_producer.bulk.store import new_run_id
from omlx_producer.errors import JobCancelled
from omlx_producer.signals import StopSignals


def stream_results(
    client: Client,
    options: RunOptions,
    given: Given | None = None,
    *,
    ordered: bool = False,
    progress: Show = None,
    check: Check = None,
    change: Callable[[Iterator[Row | BadRow]], Iterator[Row | BadRow]] = iter,
) -> Generator[RowResult]:
    """Run all rows; yields each result as its row ends.

    A row counts as done once it is here, so nothing of a run that is killed can be resumed. When
    the iterator is closed before its end, the rows that wait leave Redis.

    Args:
        given: rows in memory, which take the place of the input.
        ordered: yield in the order of the input; a result is held until all before it have come.
        check: see `Driver`.
        change: makes the rows that run of those of the input.

    Raises, while iterating: the errors of `omlx_producer.bulk.run.run_here`.
    """
    client.require_suitable()
    models, run, arrived = client.models(), new_run_id(), Arrived()
    options = options.with_default_model(models, None)
    with Input.open(options, models, given) as source:
        rows, finished = change(source.all_rows()), False
        if ordered:
            rows = arrived.expect(rows)
        driver = Driver(client, options, source, run, rows, arrived, show=progress, check=check)
        driver.meter.total = source.estimate()
        try:
            for _ in driver.turns(StopSignals()):
                yield from arrived.take()
            if driver.collector.cancelled:
                told = driver.collector.cancelled
                raise JobCancelled(told.split()[0], told)
            finished = True
        finally:
            if driver.collector.busy:
                with contextlib.suppress(RedisError):
                    driver.collector.abandon()
            driver.end(finished=finished)


class Arrived:
    """The sink of such a run; see `omlx_producer.bulk.collector.Sink`."""

    def __init__(self) -> None:
        self._results: deque[RowResult] = deque()
        self._expected: deque[int] | None = None
        self._held: dict[int, RowResult] = {}

    def expect(self, rows: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """All rows; their results are then taken in this order."""
        expected = self._expected = deque[int]()
        for row in rows:
            expected.append(row.line)
            yield row

    def commit(self, results: Sequence[RowResult]) -> None:
        self._results.extend(results)

    def take(self) -> Iterator[RowResult]:
        """The results whose turn it is, each once."""
        while self._results:
            result = self._results.popleft()
            if self._expected is None:
                yield result
            else:
                self._held[result.line] = result
        while self._expected and self._expected[0] in self._held:
            yield self._held.pop(self._expected.popleft())
