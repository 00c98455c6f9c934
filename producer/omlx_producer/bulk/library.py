"""Bulk work from Python: rows of many kinds in, results out; see `omlx_producer.Producer.run`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self

from omlx_producer.bulk.arguments import BulkArguments as BulkArguments
from omlx_producer.bulk.arguments import read_arguments
from omlx_producer.bulk.detached import BatchHandle as BatchHandle
from omlx_producer.bulk.given import is_frame, with_answers
from omlx_producer.bulk.input import Client
from omlx_producer.bulk.progress import Show as Show
from omlx_producer.bulk.result import BulkResult
from omlx_producer.bulk.row import RowResult, as_document
from omlx_producer.bulk.run import detach, run_here
from omlx_producer.bulk.stream import stream_results
from omlx_producer.bulk.table import TableForm, columns_asked


class BulkResults:
    """The results of a run, each as its row ends; see `Producer.run`.

    Closing it, or leaving its block, before its end takes the rows that wait out of Redis.

    >>> with producer.run(["def f(x):", "class A:"], ordered=True) as results:
    ...     [result.custom_id for result in results]
    ['row-1', 'row-2']
    """

    def __init__(self, results: Generator[RowResult], rows: Any, form: TableForm) -> None:
        self._results = results
        self._rows = rows
        self._form = form

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BulkResult:
        return BulkResult.of(as_document(next(self._results)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run. Rows that run go on to their end."""
        self._results.close()

    def frame(self) -> Any:
        """The rows as a frame of the kind that was given, with what is left of the results.

        The columns are those of a table that ``omlx-submit run --keep`` writes, in the order of the
        rows.

        Raises:
            TypeError: if the rows were no frame.
        """
        if not is_frame(self._rows):
            raise TypeError(f"the rows were no frame of pandas or polars: {type(self._rows)}")
        ended = sorted(self._results, key=lambda result: result.line)
        documents = ((result.line, as_document(result)) for result in ended)
        return with_answers(self._rows, documents, self._form)


def run_into(
    client: Client,
    rows: Any,
    out: str | os.PathLike[str],
    arguments: BulkArguments,
    *,
    ordered: bool,
    only_failures: bool,
    replace: bool,
    progress: Show,
) -> Counter[str]:
    """See `Producer.run`, with files."""
    options, given = read_arguments(rows, arguments, files=True)
    ended = run_here(
        client,
        options,
        Path(out),
        given,
        ordered=ordered,
        only_failures=only_failures,
        replace_results=replace,
        progress=progress,
    )
    ended.require_finished()
    return ended.failures


def run_through(
    client: Client, rows: Any, arguments: BulkArguments, *, ordered: bool, progress: Show
) -> BulkResults:
    """See `Producer.run`, without files."""
    options, given = read_arguments(rows, arguments, files=False)
    results = stream_results(client, options, given, ordered=ordered, progress=progress)
    properties = columns_asked(options.sampling)
    form = TableForm(options.with_body, properties, vectors=options.embed)
    return BulkResults(results, rows, form)


def run_detached(client: Client, rows: Any, arguments: BulkArguments) -> BatchHandle:
    """See `Producer.batch`."""
    options, given = read_arguments(rows, arguments, files=False)
    return BatchHandle(detach(client, options, given).id, client.connection)
