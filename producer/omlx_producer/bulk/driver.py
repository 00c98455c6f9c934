"""What all runs do: rows go through batches into a sink, and progress is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from omlx_producer.bulk.collector import Collector, Sink, turns
from omlx_producer.bulk.input import Client, Input
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.plan import balanced
from omlx_producer.bulk.progress import Progress, Show
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.signals import StopSignals

Check = Callable[[], object] | None


class Driver:
    """Takes the rows of a run into a sink.

    Args:
        run: its id.
        rows: of the source, those to run.
        errors: the file of errors, for what is shown.
        only_failures: whether the rows are those that failed before; others are not counted then.
        check: called before the first turn and after each. What it raises ends the run.

    Attributes:
        meter: what is shown.
    """

    def __init__(
        self,
        client: Client,
        options: RunOptions,
        source: Input,
        run: str,
        rows: Iterable[Row | BadRow],
        sink: Sink,
        *,
        show: Show,
        errors: Path | None = None,
        only_failures: bool = False,
        check: Check = None,
    ) -> None:
        self._source = source
        self._only_failures = only_failures
        self._check = check
        self._progress = Progress(client.connection, run, show, errors)
        self.meter = self._progress.meter
        self.meter.ignored = source.maker.ignored
        self.collector = Collector(
            client.connection,
            run,
            balanced(rows),
            sink,
            window=options.window,
            priority=options.priority,
            job_timeout=options.job_timeout,
            on_results=self._progress.count,
            rerun_failures=only_failures,
        )

    def turns(self, signals: StopSignals) -> Iterator[None]:
        """Turn the collector until nothing is left to do, and show each turn; see `turns` there.

        Raises, while iterating:
            KeyboardInterrupt: also if rows are waited for after an interrupt, and no worker lives.
        """
        meter, seen = self.meter, self._source.seen
        if self._check:
            self._check()
        for _ in turns(self.collector, signals):
            meter.before = seen.done
            if not self._only_failures:
                meter.total = max(meter.total, seen.rows) if meter.total else None
            self._progress.show(self._source.maker.used, self.collector.in_flight)
            if self._check:
                self._check()
            if signals.asked and self.collector.stopped and not self._progress.served:
                raise KeyboardInterrupt
            yield

    def end(self, *, finished: bool) -> None:
        """Show the summary."""
        meter, seen = self.meter, self._source.seen
        meter.before = seen.done
        if not self._only_failures:
            meter.failed_before = seen.failed
            if seen.all or meter.total is None:
                meter.total = seen.rows
        if not finished:
            meter.left = max(0, (meter.total or 0) - meter.before - meter.done)
        elif self._only_failures:
            meter.total = None
        meter.now = None
        self._progress.end()
