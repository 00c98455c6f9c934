"""A whole run: a file of requests in, a file of results out; or all its rows left to Redis."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import click
from redis.exceptions import RedisError

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.driver import Check, Driver
from omlx_producer.bulk.given import Given
from omlx_producer.bulk.input import Client, Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.output import (
    Guard,
    Output,
    real_path,
    require_run_output,
)
from omlx_producer.bulk.progress import Show, left_text, say_ignored, say_left_out
from omlx_producer.bulk.row import place_of
from omlx_producer.errors import InvalidRequest, JobCancelled
from omlx_producer.signals import StopSignals


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        finished: False if it was interrupted.
        failures: rows of the output that have failed, in this run or an earlier one, by code. Those
            that the input no longer has do not count.
        cancelled: who has cancelled one of its batches, in words; empty if nobody did.
        left: the rows that it has left without a result, in words; empty if there are none.
    """

    finished: bool
    failures: Counter[str]
    cancelled: str = ""
    left: str = ""

    def require_finished(self) -> None:
        """Raise what has ended the run early, if anything has.

        Raises:
            JobCancelled: if one of its batches was cancelled.
            KeyboardInterrupt: if it was interrupted.
        """
        if self.cancelled:
            raise JobCancelled(self.cancelled.split()[0], self.cancelled)
        if not self.finished:
            raise KeyboardInterrupt


def run_here(
    client: Client,
    options: RunOptions,
    output: Path,
    given: Given | None = None,
    *,
    ordered: bool = False,
    only_failures: bool = False,
    refused_too: bool = False,
    replace_results: bool = False,
    progress: Show = "auto",
    check: Check = None,
) -> Ended:
    """Run the rows that have no result yet, or only those that failed and may succeed now.

    Args:
        given: rows in memory, which take the place of the input.
        refused_too: with ``only_failures``, run also those that a worker refused.
        replace_results: run with other options than the last run's, and keep a copy of its output.
        check: see `Driver`.

    Raises:
        InvalidRequest: if input or output cannot be used, or a worker refuses what the options ask
            of every row.
        UnsuitableRedis: if the server would lose jobs.
        redis.exceptions.RedisError: if Redis was away for too long.
        OSError: if a file cannot be read or written.
        KeyboardInterrupt: at the second interrupt.
    """
    path = real_path(output)
    require_run_output(
        path, options.input, keep=options.keep, vectors=options.embed, each=options.settings["each"]
    )
    client.require_suitable()
    models, earlier = client.models(), RunOptions.of_run(path)
    options = options.with_default_model(models, earlier)
    with (
        Input.open(options, models, given, only_failures=only_failures) as source,
        Output.open(path) as target,
    ):
        if not only_failures:
            if earlier is not None:
                _say_other_input(options, earlier, path)
                if options.replaces(earlier, path, target.store.count("results"), replace_results):
                    target.keep_copy()
            target.store.remember(options.settings)
        run = Run(client, options, source, target, only_failures, refused_too, progress, check)
        return run.go(ordered=ordered)


class Run:
    """The rows of an input on their way into an output."""

    def __init__(
        self,
        client: Client,
        options: RunOptions,
        source: Input,
        target: Output,
        only_failures: bool,
        refused_too: bool,
        show: Show,
        check: Check,
    ) -> None:
        self._options = options
        self._source = source
        self._target = target
        self._only_failures = only_failures
        store = target.store
        self._driver = Driver(
            client,
            options,
            source,
            store.run,
            source.rows(store, only_failures=only_failures, refused_too=refused_too),
            Guard(target, source.maker.constraint, proven=store.count("results") > 0),
            show=show,
            errors=target.errors,
            only_failures=only_failures,
            check=check,
        )
        self._driver.meter.total = source.estimate(store if only_failures else None)

    def _left(self) -> str:
        """See `Ended.left`."""
        rows, waited = self._driver.meter.left, self._driver.collector.waited
        if not rows:
            return ""
        row = min(waited, key=lambda row: row.line, default=None)
        first = f", the first of them {place_of(row.line, row.custom_id)}" if row else ""
        return left_text(rows) + first

    def go(self, *, ordered: bool) -> Ended:
        """Run all rows and finish the files."""
        signals, finished, collector = StopSignals(), False, self._driver.collector
        try:
            with signals.caught():
                for _ in self._driver.turns(signals):
                    pass
                finished = not collector.stopped
                if finished:
                    self._finish(ordered)
        except InvalidRequest:
            with contextlib.suppress(RedisError):
                collector.abandon()
            raise
        finally:
            self._show_end(finished)
        failures = self._target.store.failures(seen=self._source.whole)
        return Ended(finished, failures, collector.cancelled, self._left())

    def _finish(self, ordered: bool) -> None:
        source, target = self._source, self._target
        if self._only_failures:
            _require_failed(self._options, source, target)
            target.store.remember(self._options.settings)
        form = source.table_form()
        with source.kept_records(target.store) as records:
            target.finish(
                ordered=ordered,
                whole=source.whole,
                form=form,
                source=records,
                each=None if self._options.each is None else Path(self._options.each),
            )
        if source.whole and not self._only_failures:
            self._driver.collector.sweep()
            target.say_gone()
        say_left_out(source.maker.skipped, source.other_files)

    def _show_end(self, finished: bool) -> None:
        self._driver.meter.files = self._target.rows()
        self._driver.end(finished=finished)


def detach(client: Client, options: RunOptions, given: Given | None = None) -> Batch:
    """Put all rows into a new batch. Rows that can never run have their error at once.

    Raises:
        InvalidRequest: if the input cannot be read.
        UnsuitableRedis: if the server would lose jobs.
        redis.exceptions.RedisError: if Redis does not answer; the batch never runs.
    """
    client.require_suitable()
    with Input.open(options, client.models(), given) as source:
        batch = Batch.create(
            client.connection,
            priority=options.priority,
            job_timeout=options.job_timeout,
        )
        batch.upload(source.all_rows())
        say_ignored(source.maker.ignored)
        say_left_out(source.maker.skipped, source.other_files)
    return batch


def _say_other_input(options: RunOptions, earlier: RunOptions, path: Path) -> None:
    if earlier.input != options.settings["input"]:
        click.echo(
            f"{path} keeps its rows of {earlier.input}; for {options.input} alone, give another "
            "output",
            err=True,
        )


def _require_failed(options: RunOptions, source: Input, target: Output) -> None:
    """Refuse an input that is not the one whose rows failed, or of which none failed and some have
    not run.

    Raises:
        InvalidRequest: with the remedy.
    """
    if target.store.failures() and not source.seen.failed:
        raise InvalidRequest(
            None,
            f"{options.input}: holds none of the rows that failed in {target.path}",
            "give the input of that run",
        )
    if source.seen.unrun and not source.seen.failed:
        rows = left_text(source.seen.unrun, "not run")
        raise InvalidRequest(None, f"{target.path}: {rows}", "give the run's command again")
