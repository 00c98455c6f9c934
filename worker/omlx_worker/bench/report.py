"""The figures of a benchmark as a table for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from omlx_worker.bench.laps import Measured
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, STREAM

THEIRS = {BATCH_GENERATOR: "mlx-lm batch", STREAM: "mlx-lm stream"}
COLUMNS = ("tok/s", "x mlx-lm", "ms/step", "tok/step", "accepted", "MiB")


def in_rows(count: int) -> str:
    """A number of rows in words."""
    return "1 row" if count == 1 else f"{count} rows"


def print_report(figures: Sequence[Measured], machine: Mapping[str, Any], model: str) -> None:
    """Print the figures so far on stdout."""
    console = Console()
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(f"{model} on {machine['device']}, {machine['system']}, {versions}")
    console.print(table_of(figures))
    for measured in figures:
        if measured.failed:
            console.print(f"{in_rows(measured.rows)}, {_name(measured)}: {measured.failed}")


def table_of(figures: Sequence[Measured]) -> Table:
    """A table of at most 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    rows = 0
    for measured in figures:
        if measured.laps:
            if rows and measured.rows != rows:
                table.add_section()
            table.add_row("" if measured.rows == rows else str(measured.rows), *_cells(measured))
            rows = measured.rows
    return table


def _cells(measured: Measured) -> list[str]:
    ratio = f"{statistics.median(measured.ratios):.2f}" if measured.ratios else "-"
    return [
        _name(measured),
        f"{measured.tokens_per_second:.0f}",
        ratio,
        f"{measured.ms_per_step:.2f}",
        f"{measured.tokens_per_step:.2f}",
        " ".join(f"{share:.2f}".lstrip("0") for share in measured.accepted),
        f"{measured.peak / 2**20:.0f}",
    ]


def _name(measured: Measured) -> str:
    if measured.side in THEIRS:
        return THEIRS[measured.side]
    if measured.side == AUTO:
        return f"auto: {measured.depth}" if measured.laps else AUTO
    depth = measured.side.removeprefix("K=")
    return "no drafts" if depth == "0" else f"{depth} draft{'s' * (depth != '1')}"
