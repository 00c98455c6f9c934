"""What a run shows on stderr: a bar on a terminal, else a JSON line every few seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import click
import redis
from redis.exceptions import RedisError
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from omlx_producer.bulk.batch import latest_version
from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.bulk.row import NO_MODEL, REFUSED, BadRow, Row, RowResult
from omlx_producer.client.models import read_models
from omlx_producer.console import TableConsole
from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.figures import read_figures, read_started
from omlx_producer.terminal import counted, duration, without_counts, write
from omlx_producer.wire import ModelInfo, answer_text, row_job_id
from omlx_producer.wire.answer import as_completion

Style = Literal["auto", "bar", "ndjson", "none"]
STYLES: tuple[Style, ...] = get_args(Style)
Told = Callable[[int, int | None], object]
Show = Style | Told | None
"""How a run is shown. A program is told how many rows have ended, and of how many (None if that is
not known), whenever that changes. None shows nothing."""
LINE_SECONDS = 5.0
BAR_SECONDS = 0.25
FIGURES_SECONDS = 2.0
LEAST_BAR, MOST_BAR = 8, 40
# Room at the end of the bar's line for the ^C that a terminal echoes.
ECHO_COLUMNS = 3
SHOWN_BAD_ROWS = 20
SHOWN_SUFFIXES = 5
FIRST_ANSWERS = 20
LOOP_ADVICE = "give a temperature, --repetition-penalty, or --no-end-loops to let them go on"
CUT_ADVICE = "give them more tokens with --max-completion-tokens, or in their rows"


class Display(Protocol):
    """Shows a run on stderr."""

    def update(self, meter: Meter) -> None:
        """Show the current state, if it is time to."""

    def end(self, meter: Meter) -> None:
        """Show the summary."""


def make_display(style: Show) -> Display:
    if style is None:
        return Silence()
    if callable(style):
        return Teller(style)
    if style not in STYLES:
        remedy = f"give a function, or one of {', '.join(STYLES)}"
        raise InvalidRequest("progress", f"got {shown(style)}", remedy)
    if style == "auto":
        return Bar() if sys.stderr.isatty() else StatusLines(readable=True)
    displays: dict[str, type[Display]] = {"bar": Bar, "ndjson": StatusLines, "none": Silence}
    return displays[style]()


class Silence:
    """Shows nothing."""

    def update(self, meter: Meter) -> None:
        pass

    def end(self, meter: Meter) -> None:
        pass


class Teller:
    """Tells a program."""

    def __init__(self, tell: Told) -> None:
        self._tell = tell
        self._told: tuple[int, int | None] | None = None

    def update(self, meter: Meter) -> None:
        told = (meter.before + meter.done, meter.total)
        if told != self._told:
            self._told = told
            self._tell(*told)

    def end(self, meter: Meter) -> None:
        self.update(meter)


class StatusLines:
    """One JSON document per line.

    Args:
        readable: put a summary in sentences before the one in JSON.
    """

    def __init__(self, *, readable: bool = False) -> None:
        self._readable = readable
        self._shown_at = time.monotonic()

    def update(self, meter: Meter) -> None:
        if time.monotonic() - self._shown_at >= LINE_SECONDS:
            self._shown_at = time.monotonic()
            click.echo(json.dumps({"type": "progress", **meter.snapshot()}), err=True)

    def end(self, meter: Meter) -> None:
        summary = meter.summary()
        if self._readable:
            write(summary_text(summary) + "\n", err=True)
        click.echo(json.dumps({"type": "summary", **summary}), err=True)


class Bar:
    """A progress bar, and a summary in sentences."""

    def __init__(self) -> None:
        self._live = Live(console=TableConsole(stderr=True), auto_refresh=False)
        self._shown_at = float("-inf")
        self._live.start()

    def update(self, meter: Meter) -> None:
        if time.monotonic() - self._shown_at >= BAR_SECONDS:
            self._show(meter)

    def end(self, meter: Meter) -> None:
        self._show(meter)
        self._live.stop()
        write(summary_text(meter.summary()) + "\n", err=True)

    def _show(self, meter: Meter) -> None:
        self._shown_at = time.monotonic()
        self._live.update(bar_line(meter, self._live.console.width - ECHO_COLUMNS), refresh=True)


class WorkerWatch:
    """Reads what the workers of some models do for a run or a batch every `FIGURES_SECONDS`.

    It says on stderr, once, why no worker takes the rows that wait.

    Args:
        run: how the ids of its batches begin, without ``batch-``.

    Attributes:
        served: whether rows may end: none is in Redis, or a worker lives, or that is not known.
    """

    def __init__(self, connection: redis.Redis, run: str) -> None:
        self.served = True
        self._connection = connection
        self._run, self._own = run, row_job_id(run, "").removesuffix("-").encode()
        self._looked_at = float("-inf")
        self._held_up: set[str] = set()
        self._told: set[str] = set()

    def look(self, models: Iterable[str], meter: Meter, in_flight: int) -> None:
        """Tell the meter what runs and, while nothing does, why.

        Rows of a batch advance together, so the run's tokens a second are its share of the rows.

        Args:
            in_flight: rows in Redis.
        """
        if not in_flight:
            meter.now, meter.held_up, self.served = Speed(0, 0.0, 0.0), "", True
            self._tell({})
            return
        if time.monotonic() - self._looked_at < FIGURES_SECONDS:
            return
        self._looked_at = time.monotonic()
        meter.now, meter.held_up, self.served = None, "", True
        # The collector meets an outage.
        with contextlib.suppress(RedisError):
            running, tokens_in, tokens_out, held_up = 0, 0.0, 0.0, dict[str, str]()
            served = False
            version = latest_version(self._connection, self._run)
            for alias in models:
                [model] = read_figures(self._connection, alias)
                if told := model.held_up or model.too_new("the file", version):
                    held_up[without_counts(told)] = told
                if not (workers := model.workers):
                    # What a dead one had has a lease, and does not run.
                    continue
                served, started = True, read_started(self._connection, alias)
                own = sum(job.startswith(self._own) for job in started)
                share = own / max(1, len(started))
                running += own
                tokens_in += share * sum(worker.prompt_tokens_per_second for worker in workers)
                tokens_out += share * sum(worker.tokens_per_second for worker in workers)
            meter.now, self.served = Speed(running, tokens_in, tokens_out), served
            meter.held_up = "" if running else "; ".join(held_up.values())
            self._tell(held_up)

    def _tell(self, held_up: Mapping[str, str]) -> None:
        """Print the reasons that two looks in a row have found.

        Args:
            held_up: the reasons by what they say without their numbers, which may change.
        """
        found = set(held_up)
        self._told &= found
        for about in sorted((found & self._held_up) - self._told):
            write(f"{held_up[about]}; rows wait, and Ctrl-C loses none\n", err=True)
            self._told.add(about)
        self._held_up = found


class Progress:
    """Counts and shows a run or a batch: the rows that end, what the workers do, a summary.

    Args:
        run: see `WorkerWatch`.
        errors: the file that a report of bad rows names; None for a batch, which has none.
    """

    def __init__(
        self, connection: redis.Redis, run: str, style: Show, errors: Path | None = None
    ) -> None:
        self.meter = Meter()
        self._bad_rows = BadRowReporter(errors) if errors and isinstance(style, str) else None
        self._markers = MarkerReporter(connection) if isinstance(style, str) else None
        self._watch = WorkerWatch(connection, run)
        self._display = make_display(style)

    @property
    def served(self) -> bool:
        """See `WorkerWatch`."""
        return self._watch.served

    def count(self, results: list[RowResult]) -> None:
        """Count rows that ended."""
        self.meter.count(results)
        if self._bad_rows:
            self._bad_rows.report(results)
        if self._markers:
            self._markers.count(results)

    def show(self, models: Iterable[str], in_flight: int) -> None:
        """Show the current state, if it is time to; see `WorkerWatch.look`."""
        self._watch.look(models, self.meter, in_flight)
        self._display.update(self.meter)

    def end(self) -> None:
        """Show the summary."""
        if self._markers:
            self._markers.end()
        self._display.end(self.meter)


def bar_line(meter: Meter, width: int) -> Table:
    """The rows so far, a bar, and as many figures as fit."""
    done = meter.before + meter.done
    rows = f"{done:,} rows" if meter.total is None else f"{done:,}/{meter.total:,}"
    room = max(0, width - len(rows) - LEAST_BAR - 2)
    known = figures(meter)
    while len(shown := ", ".join(known)) > room:
        known.pop()
    bar = ProgressBar(
        meter.total,
        done,
        width=min(MOST_BAR, LEAST_BAR + room - len(shown)),
        pulse=meter.total is None,
    )
    line = Table.grid(padding=(0, 1))
    line.add_row(rows, bar, shown)
    return line


class BadRowReporter:
    """Reports the first bad rows of the input on stderr."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._count = 0

    def report(self, results: list[RowResult]) -> None:
        for row in (result.row for result in results):
            if not isinstance(row, BadRow):
                continue
            self._count += 1
            if self._count <= SHOWN_BAD_ROWS:
                write(row.reason + "\n", err=True)
            elif self._count == SHOWN_BAD_ROWS + 1:
                write(f"more bad lines are in {self._errors}\n", err=True)


class MarkerReporter:
    """Says on stderr, once, how many of the first answers hold a marker of their model.

    Such a run fills a file with what its model thinks, or with headers, and nobody reads the first
    answers before the last one has come.
    """

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self._models: dict[str, ModelInfo] = {}
        self._answers = 0
        self._holding: Counter[tuple[str, str]] = Counter()

    def count(self, results: Iterable[RowResult]) -> None:
        """Look at results, if they are among the first."""
        answers = ((result.row, result.body) for result in results if result.body)
        for row, body in itertools.islice(answers, FIRST_ANSWERS - self._answers):
            if not isinstance(row, Row):
                continue
            self._answers += 1
            text = "\n".join(map(answer_text, as_completion(body).get("choices", ())))
            alias = row.request.model
            found = (marker for marker in self._markers(alias) if marker in text)
            self._holding.update((alias, marker) for marker in found)
            if self._answers == FIRST_ANSWERS:
                self._tell("; Ctrl-C stops the run")

    def end(self) -> None:
        """Say it of a run with fewer answers."""
        if self._answers < FIRST_ANSWERS:
            self._tell("")

    def _markers(self, alias: str) -> Sequence[str]:
        if alias not in self._models:
            # The collector meets an outage.
            with contextlib.suppress(RedisError):
                self._models = read_models(self._connection)
        return self._models[alias].markers if alias in self._models else ()

    def _tell(self, remedy: str) -> None:
        for (alias, marker), answers in self._holding.most_common(1):
            write(
                f"{answers} of the first {self._answers} answers hold {marker}, which no answer of "
                f"{alias} should; see: omlx-worker check -m {self._models[alias].model}{remedy}\n",
                err=True,
            )


def figures(meter: Meter) -> list[str]:
    """The figures beside the bar, the most needed first."""
    tokens_in, tokens_out = meter.token_rates()
    parts = []
    if (eta := meter.eta()) is not None:
        parts.append(f"about {duration(eta)} left")
    if meter.failed:
        parts.append(f"{meter.failed} failed")
    if meter.held_up:
        parts.append(meter.held_up)
    else:
        if meter.now is not None:
            parts.append(f"{meter.now.running} running")
        parts.append(f"{tokens_in:.0f} tok/s in, {tokens_out:.0f} out")
    if meter.acceptance is not None:
        parts.append(f"{meter.acceptance:.0%} accepted")
    parts.append(f"after {duration(meter.seconds)}")
    return parts


def summary_text(end: Mapping[str, Any]) -> str:
    """The summary of a run, see `Meter.summary`, in a few lines."""
    lines = [
        f"{counted(end['rows'], 'row')} in {duration(end['seconds'])}: "
        f"{end['ok']} ok, {end['failed']} failed"
        + (f"; done before: {end['done_before']}" if end["done_before"] else "")
        + (f", {end['failed_before']} of them failed" if end["failed_before"] else "")
        + (f"; {left_text(left)}" if (left := end["without_result"]) else "")
    ]
    lines += [f"  {count} {code}" for code, count in end["failures"].items()]
    cached, drafts = end["cached_tokens"], end["acceptance"]
    if end["rows"]:
        lines.append(
            f"tokens: {end['prompt_tokens']} in ({end['prompt_tokens_per_second']:.0f}/s"
            + (f", {cached / end['prompt_tokens']:.0%} cached" if cached else "")
            + f"), {end['completion_tokens']} out ({end['completion_tokens_per_second']:.0f}/s)"
            + (f", {drafts:.0%} of drafts accepted" if drafts is not None else "")
        )
    if cut := end["cut_by_length"]:
        lines.append(f"{counted(cut, 'row')} cut by length; {CUT_ADVICE}")
    if loops := end["cut_by_repetition"]:
        lines.append(f"{counted(loops, 'row')} cut by repetition; {LOOP_ADVICE}")
    if ignored := end["ignored_fields"]:
        lines.append(ignored_text(ignored))
    if files := end["files"]:
        lines.append(written_text(files))
    return "\n".join(lines)


def left_text(rows: int, how: str = "no result") -> str:
    """How many rows a run that ended early has left."""
    return f"{counted(rows, 'row')} {'has' if rows == 1 else 'have'} {how}"


def failure_text(failures: Counter[str], save: str, retry: str) -> str:
    """How many rows failed, and what to do about them.

    Args:
        failures: rows by code.
        save: what to do before another try.
        retry: the command for it, as in ``with: COMMAND``.
    """
    failed, unserved = failures.total(), failures[NO_MODEL]
    repeatable = failed - unserved - sum(failures[code] for code in REFUSED)
    if repeatable:
        some = "" if repeatable == failed else f"{repeatable} of them "
        advice = f"{save}try {some}again {retry}"
    elif unserved:
        some = "" if unserved == failed else f" for {unserved} of them"
        advice = f"no worker has announced the model{some}; start one, {save}then try again {retry}"
    else:
        advice = "another try would fail too; correct the input, and run the same command"
    return f"{counted(failed, 'row')} failed; {advice}"


def written_text(files: Mapping[Path, int] | Mapping[str, int]) -> str:
    """The files that were written, with their rows."""
    return "written: " + ", ".join(f"{path} ({counted(n, 'row')})" for path, n in files.items())


def ignored_text(ignored: Mapping[str, int]) -> str:
    """The fields that have no effect, with the rows that have them."""
    return "rows with ignored fields: " + ", ".join(f"{name} {n:,}" for name, n in ignored.items())


def say_ignored(ignored: Mapping[str, int]) -> None:
    if ignored:
        write(ignored_text(ignored) + "\n", err=True)


def say_left_out(rows: int, files: Counter[str]) -> None:
    """Say what of the input was left out.

    Args:
        rows: with empty fields.
        files: of a folder, those that are no pictures, by suffix.
    """
    if rows:
        write(f"{counted(rows, 'row')} with empty fields left out\n", err=True)
    if files:
        ranked = sorted(files.items(), key=lambda entry: (-entry[1], entry[0]))
        most = ", ".join(f"{count} {suffix}" for suffix, count in ranked[:SHOWN_SUFFIXES])
        more = ", ..." if len(files) > SHOWN_SUFFIXES else ""
        told = f"{counted(files.total(), 'file')} left out, no picture or PDF by name"
        write(f"{told}: {most}{more}\n", err=True)
