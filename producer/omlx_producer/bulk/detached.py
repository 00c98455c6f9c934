"""A detached batch from outside: waiting for its end, and fetching its results."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from omlx_producer.bulk.batch import Batch, BatchState
from omlx_producer.bulk.output import (
    real_path,
    require_batch_output,
    require_output,
    write_results,
)
from omlx_producer.bulk.progress import Progress, Show
from omlx_producer.bulk.result import BulkResult
from omlx_producer.bulk.store import run_path
from omlx_producer.bulk.table import TableForm, columns_of
from omlx_producer.client.outcome import require_timeout
from omlx_producer.errors import InvalidRequest, JobTimeout
from omlx_producer.terminal import local_time

WAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """A detached batch. Another process needs only its id; see `Producer.find_batch`.

    >>> batch = producer.batch(["def f(x):", "class A:"])
    >>> batch.wait().ok
    2
    >>> [result.custom_id for result in batch.results()]
    ['row-1', 'row-2']
    """

    id: str
    connection: redis.Redis = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self._batch.id)

    def status(self) -> BatchState:
        """Its state: rows, how many of them have ended and how, tokens, times.

        Raises:
            UnknownJob: if it does not exist, or has expired.
        """
        return self._batch.read()

    def wait(self, timeout: float | None = None, *, progress: Show = None) -> BatchState:
        """Wait for its end.

        Args:
            timeout: seconds to wait; None waits for ever.
            progress: see `Producer.run`.

        Raises:
            JobTimeout: if the timeout passes first; the batch goes on.
            UnknownJob: if it does not exist, or has expired.
        """
        return follow(self._batch, progress, timeout=timeout)

    def results(self) -> Iterator[BulkResult]:
        """The results so far, in the order of the rows.

        Raises:
            InvalidRequest: if they have left Redis for a file, as those of a run do.
            UnknownJob: after the last one, if some are missing in Redis.
        """
        state = self.status()
        require_in_redis(state)
        for line in self._batch.results(state):
            yield BulkResult.of(json.loads(line))

    def download(
        self,
        out: Path | str,
        *,
        keep: bool = False,
        partial: bool = False,
        with_body: bool = False,
        csv_safe: bool = True,
        response_format: Mapping[str, Any] | None = None,
        choices: Sequence[str] | None = None,
    ) -> None:
        """Write the results of a batch that is over into files, as ``omlx-submit results -o`` does.

        They leave Redis then. A second call for the same file changes nothing.

        Args:
            out: a name in ``.jsonl``, ``.csv`` or ``.parquet``.
            keep: leave the results in Redis, too.
            partial: write the results so far of one that is not over, and keep them.
            with_body: add the whole response to a table.
            csv_safe: put ``'`` before cells of a CSV that look like formulas.
            response_format: a table gets a column for each of its properties.
            choices: a table gets a column for the probability of each.

        Raises:
            InvalidRequest: if the file has another suffix or holds something else, or the results
                have left Redis for another one, as those of a run do.
            JobTimeout: if the batch is not over.
            UnknownJob: if results are missing in Redis; nothing is written then.
            OSError: if a file cannot be written.
        """
        path, state = real_path(Path(out)), self.status()
        if was_fetched(state, path):
            return
        if not (state.over or partial):
            raise JobTimeout(f"{self.id} is not over; wait for it, or give partial=True")
        require_free(path, self._batch)
        form = TableForm(with_body, columns_of(response_format, choices), csv_safe=csv_safe)
        fetch(self._batch, state, path, form, keep=keep)

    def cancel(self) -> bool:
        """Drop the rows that wait, and stop those that run. Results so far are kept.

        Returns:
            False if it was over.
        """
        return self._batch.cancel()

    @property
    def _batch(self) -> Batch:
        return Batch(self.connection, self.id)


def follow(batch: Batch, show: Show, *, timeout: float | None = None) -> BatchState:
    """Show the progress of a batch until its end, and say if nobody serves one of its models.

    Raises:
        JobTimeout: if it has not ended after these seconds.
    """
    require_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    progress, state = Progress(batch.connection, batch.run, show), batch.read()
    # Rates are those from now on.
    progress.meter.adopt(state)
    progress.meter.restart()
    try:
        while not state.over:
            left = WAIT_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise JobTimeout(f"{batch.id} did not end within {timeout:g} s")
            time.sleep(min(left, WAIT_SECONDS))
            state = batch.read()
            progress.meter.adopt(state)
            progress.show(state.models, state.left)
    finally:
        progress.end()
    return state


def was_fetched(state: BatchState, output: Path | None) -> bool:
    """Whether the results have left Redis for this output.

    Raises:
        InvalidRequest: if they have left it for another one.
    """
    if state.fetched_to == place_of(output) and state.fetched_at is not None:
        return True
    require_in_redis(state)
    return False


def require_in_redis(state: BatchState) -> None:
    """Check that the results have not left Redis, and are no run's.

    Raises:
        InvalidRequest: says where they are, and when they have left.
    """
    if state.home:
        raise InvalidRequest(
            None,
            f"{state.id}: is a batch of a run, whose command writes the results to its output",
            "use that file",
        )
    if state.fetched_at is not None:
        raise InvalidRequest(None, fetched_text(state))


def fetched_text(state: BatchState) -> str:
    """When the results of a batch have left Redis, and for which file."""
    moment = local_time(state.fetched_at or 0.0)
    return f"{state.id}: its results left Redis at {moment}, for {state.fetched_to}; use that file"


def require_free(output: Path, batch: Batch) -> None:
    """Refuse an output that belongs to something else than a batch.

    Raises:
        InvalidRequest: with the remedy.
    """
    require_output(output)
    if run_path(output).exists():
        raise InvalidRequest("output", f"{output} belongs to an omlx-submit run", "give another")
    require_batch_output(output, batch.run, batch.results(batch.read()))


def fetch(
    batch: Batch, state: BatchState, output: Path, form: TableForm, *, keep: bool
) -> dict[Path, int]:
    """Write the results so far. Those of a batch that has ended then leave Redis.

    Args:
        keep: leave them there; those of a batch over HTTP stay in any case.

    Returns:
        How many rows are in each file.

    Raises:
        UnknownJob: if some are missing in Redis. Files and results are as they were.
    """
    files = write_results(batch.results(state), output, form)
    if state.ended_at is not None and not keep:
        batch.drop_results(place_of(output))
    return files


def place_of(output: Path | None) -> str:
    """An output with the name of this machine, so that commands on all machines can compare it."""
    return f"{socket.gethostname()}:{output and output.absolute()}"
