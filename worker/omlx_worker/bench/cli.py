"""``omlx-worker bench``: how fast this machine decodes rows, with and without drafts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from omlx_producer.program import INTERRUPTED, INVALID, fail, option
from omlx_worker.logs import start_logging
from omlx_worker.options import (
    ModelCommand,
    by_source,
    read_settings,
    require_mlx,
    settings_options,
)
from omlx_worker.settings import MOST_OWN_DRAFTS, MOST_ROWS

if TYPE_CHECKING:
    from omlx_worker.bench.benchmark import Benchmark


def _listed(least: int, most: int, *words: str) -> Callable[..., tuple[int | str, ...] | None]:
    """Read whole numbers between bounds, and certain words, separated by commas."""

    def read(_ctx: Any, _param: Any, value: str | None) -> tuple[int | str, ...] | None:
        return None if value is None else tuple(one(part.strip()) for part in value.split(","))

    def one(part: str) -> int | str:
        if part in words:
            return part
        if part.isascii() and part.isdigit() and least <= int(part) <= most:
            return int(part)
        others = "".join(f" or {word}" for word in words)
        raise click.BadParameter(f"got {part!r}; give {least} to {most}{others}")

    return read


@click.command(cls=ModelCommand)
@settings_options({"model", "mtp_from", "state_dir", "drafter"})
@option(
    "--rows",
    callback=_listed(1, MOST_ROWS),
    default="1,4,8,16",
    show_default=True,
    help="Rows that decode at the same time.",
)
@option(
    "--depths",
    callback=_listed(0, MOST_OWN_DRAFTS, "auto"),
    help="Drafts a step.  [default: 0,1,2,3,auto, or 0 if nothing drafts]",
)
@option(
    "--context", type=click.IntRange(2), default=64, show_default=True, help="Tokens of a prompt."
)
@option(
    "--tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Tokens that a row decodes in a lap.",
)
@option(
    "--laps",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="How often every side measures.",
)
@option(
    "--json",
    "report",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write all figures here.",
)
@option(
    "--share",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write them here without names of folders, to show others.",
)
def bench(
    report: Path | None,
    share: Path | None,
    rows: Sequence[int],
    depths: Sequence[int | str] | None,
    context: int,
    tokens: int,
    laps: int,
    **options: Any,
) -> None:
    """Measure a model on this machine, beside mlx-lm. Needs no Redis.

    All sides take turns with the same prompts. Ctrl-C prints the figures so far.
    """
    # Nothing is served, so the model needs no name for requests.
    settings, _ = read_settings({"model_alias": "bench", **options})
    require_mlx()
    from omlx_worker.bench.benchmark import BenchError, Benchmark
    from omlx_worker.bench.laps import LapPlan
    from omlx_worker.build import graft_of
    from omlx_worker.engine.rows.interface import ModelError

    start_logging("warning")
    model, drafter, graft = settings.model, settings.own_drafter, graft_of(settings)
    try:
        benchmark = Benchmark(model, rows, depths, context, LapPlan(laps, tokens), drafter, graft)
    except (BenchError, ModelError) as error:
        fail(INVALID, by_source(str(error)))
    complete = _run(benchmark)
    _tell(benchmark, model, report, share, complete)
    if not complete:
        sys.exit(INTERRUPTED)


def _run(benchmark: Benchmark) -> bool:
    """Measure, with progress on stderr. False if the user interrupts it."""
    from rich.console import Console

    console = Console(stderr=True)
    try:
        with console.status("measuring") as status:
            for progress in benchmark.run():
                status.update(progress)
                if not console.is_terminal:
                    click.echo(progress, err=True)
    except KeyboardInterrupt:
        click.echo("interrupted; these are the figures so far", err=True)
        return False
    return True


def _tell(
    benchmark: Benchmark, model: str, path: Path | None, share: Path | None, complete: bool
) -> None:
    from omlx_worker.bench.report import print_report, report_of, without_names

    report = report_of(benchmark, model, complete)
    print_report(benchmark.figures, report, f"{model}, {benchmark.dtype},", benchmark.forms)
    if path is not None:
        _write("--json", path, report | {"command": " ".join(["omlx-worker", *sys.argv[1:]])})
    if share is not None:
        _write("--share", share, without_names(report, benchmark.family))


def _write(option: str, path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1))
    except OSError as error:
        fail(
            INVALID, f"{option} {path}: {error.strerror or error}; give a file that can be written"
        )
