"""The rows of an input: its records, shaped to requests, of which those without a result run."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import redis

from omlx_producer.bulk.given import Given
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.pictures import folder_of, other_files
from omlx_producer.bulk.plan import Seen, plan_rows
from omlx_producer.bulk.records import (
    Record,
    csv_style,
    delimiter_of,
    estimate_rows,
    input_columns,
    open_input,
    open_records,
    some,
)
from omlx_producer.bulk.row import REFUSED, BadRow, Row
from omlx_producer.bulk.shape import RowMaker
from omlx_producer.bulk.store import Store
from omlx_producer.bulk.table import TableForm, columns_asked
from omlx_producer.wire import ModelInfo


class Client(Protocol):
    """What bulk work needs of `omlx_producer.Producer`."""

    @property
    def connection(self) -> redis.Redis: ...

    def require_suitable(self) -> None: ...

    def models(self) -> dict[str, ModelInfo]: ...


class Input:
    """The input of a run, open to be read once.

    Attributes:
        maker: makes its rows, and counts what it does with them.
        seen: what it has shown so far.
        whole: whether all rows are read, without a limit.
        other_files: of a folder, those that are no pictures, by suffix.
    """

    def __init__(
        self,
        options: RunOptions,
        models: Mapping[str, ModelInfo],
        maker: RowMaker,
        records: Iterator[Record],
        count: int | None,
        version: tuple[int, ...],
        other_files: Counter[str],
    ) -> None:
        self._options = options
        self._models = models
        self.maker = maker
        self._records = records
        self._count = count
        self.seen = Seen()
        self.other_files = other_files
        self.whole = options.limit is None
        self._version = version

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        options: RunOptions,
        models: Mapping[str, ModelInfo],
        given: Given | None = None,
        *,
        only_failures: bool = False,
    ) -> Iterator[Input]:
        """Open the input of these options.

        Args:
            models: the known models, by alias.
            given: rows in memory, which take the place of the input.
            only_failures: rows with empty fields fail, as they have before.

        Raises:
            InvalidRequest: see `RowMaker` and `RowMaker.checked`; also if it cannot be read, or has
                no rows.
        """
        maker, version = _row_maker(options, models), _version(options)
        with _records(options, given) as records, _again(options, given) as again:
            checked = maker.checked(records, () if only_failures else again)
            count = None if given is None else given.count
            others = Counter[str]()
            if options.format == "pictures":
                others = other_files(Path(options.input))
            yield cls(options, models, maker, checked, count, version, others)

    def rows(
        self, store: Store, *, only_failures: bool = False, refused_too: bool = False
    ) -> Iterator[Row | BadRow]:
        """The rows to run; see `plan_rows`."""
        rows = map(self.maker.make, self._records)
        return plan_rows(
            rows, store, self.seen, only_failures=only_failures, refused_too=refused_too
        )

    def all_rows(self) -> Iterator[Row | BadRow]:
        """The rows, each once, whatever earlier runs did."""
        yield from self.rows(Store())

    def estimate(self, failed: Store | None = None) -> int | None:
        """About how many rows run; None if not known.

        Args:
            failed: only its failed rows run.
        """
        if failed is not None:
            return sum(n for code, n in failed.failures().items() if code not in REFUSED)
        options = self._options
        rows = self._count
        if options.input != "-":
            rows = estimate_rows(options.input, options.format)
        read = min((n for n in (rows, options.limit) if n is not None), default=None)
        return None if read is None else max(0, read - self.maker.to_skip)

    def table_form(self) -> TableForm:
        """The form of a table of this run.

        Raises:
            InvalidRequest: if the columns of the input cannot be read.
            OSError: see `kept_records`.
        """
        options, kept = self._options, {}
        if options.keep:
            self._require_unchanged()
            with open_input(options.input) as stream:
                delimiter = options.delimiter or delimiter_of(options.input)
                kept = input_columns(stream, options.format, delimiter)
        form = TableForm(
            options.with_body,
            columns_asked(options.sampling),
            kept,
            options.csv_safe,
            vectors=options.embed,
        )
        named = delimiter_of(options.input)
        if options.format != "csv" or options.input == "-" or named is not None:
            return form
        # A CSV goes out as it came in.
        delimiter, encoding = csv_style(options.input, options.delimiter)
        return replace(form, delimiter=delimiter, encoding=encoding)

    @contextlib.contextmanager
    def kept_records(self, store: Store) -> Iterator[Iterable[Record]]:
        """All records again, if the columns of the input are kept.

        Raises, also while iterating:
            OSError: if the file has changed since it was opened, so that lines may have moved.
        """
        if not self._options.keep:
            yield ()
            return
        if not self.whole:
            # Rows beyond the limit, of an earlier run, have their columns too.
            maker = _row_maker(self._options, self._models)
            with _all_records(self._options) as records:
                for _ in plan_rows(map(maker.make, records), store, Seen()):
                    pass
        with _all_records(self._options) as records:
            yield map(self._unchanged, records)

    def _unchanged(self, record: Record) -> Record:
        self._require_unchanged()
        return record

    def _require_unchanged(self) -> None:
        if _version(self._options) != self._version:
            raise OSError(errno.ESTALE, "has changed since the run began", self._options.input)


def _version(options: RunOptions) -> tuple[int, ...]:
    """What changes with each edit of an input that is read again; empty of others."""
    if not options.keep:
        return ()
    found = os.stat(options.input)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@contextlib.contextmanager
def _records(options: RunOptions, given: Given | None) -> Iterator[Iterator[Record]]:
    """The records of a run, up to its limit."""
    limit = None if options.limit is None else min(options.limit, sys.maxsize)
    if given is not None:
        records = some(given.records, "rows", "got none", "give at least one")
        yield itertools.islice(records, limit)
        return
    with _all_records(options) as records:
        yield itertools.islice(records, limit)


def _again(
    options: RunOptions, given: Given | None
) -> contextlib.AbstractContextManager[Iterator[Record] | None]:
    """The same records once more; None if they can be read only once, are whole requests or paths,
    or hold pictures."""
    once = given.count is None if given is not None else options.input == "-"
    requests = options.format == "jsonl" and options.template is None
    holds = options.format == "parquet" and options.image is not None
    skipped = once or requests or holds or options.format == "pictures"
    return contextlib.nullcontext() if skipped else _records(options, given)


def _all_records(options: RunOptions) -> contextlib.AbstractContextManager[Iterator[Record]]:
    return open_records(options.input, options.format, options.delimiter)


def _row_maker(options: RunOptions, models: Mapping[str, ModelInfo]) -> RowMaker:
    return RowMaker(
        options.format,
        options,
        models,
        folder=folder_of(Path() if options.input == "-" else Path(options.input)),
        require_known_model=options.require_known_model,
        default_model=options.default_model,
    )
