"""The report of a benchmark: the machine, and the figures as a table, as JSON or to share."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from rich import box
from rich.table import Table

from omlx_producer.console import TableConsole
from omlx_producer.terminal import counted
from omlx_worker.bench.laps import Measured
from omlx_worker.bench.sides import AUTO, BATCH_GENERATOR, STREAM
from omlx_worker.mac import chip
from omlx_worker.mac.buffers import limits

if TYPE_CHECKING:
    from omlx_worker.bench.benchmark import Benchmark

THEIRS = {BATCH_GENERATOR: "mlx-lm batch", STREAM: "mlx-lm stream"}
COLUMNS = ("rows", "", "tok/s", "x mlx-lm", "ms/step", "tok/step", "accepted", "MiB")


def machine() -> dict[str, Any]:
    """The machine, the device and the versions, for a file of results."""
    device = mx.default_device()
    name = mx.device_info().get("device_name", "") if device == mx.gpu else ""
    affinity = getattr(os, "sched_getaffinity", None)
    mac = platform.mac_ver()[0]
    system = f"macOS {mac}" if mac else f"{platform.system()} {platform.release().split('-')[0]}"
    return {
        "device": str(name) or f"{platform.machine()} processor",
        **chip.facts(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{system} {platform.machine()}",
        "buffers": limits(),
        "cores": len(affinity(0)) if affinity else os.cpu_count() or 1,
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("mlx", "mlx-lm", "omlx-queue")},
        },
    }


def print_report(
    figures: Sequence[Measured], where: Mapping[str, Any], model: str, forms: Sequence[object]
) -> None:
    """Print the figures so far on stdout.

    Args:
        forms: of the layers' parts, a line each.
    """
    console = TableConsole()
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    buffers = "".join(f", {name} {most}" for name, most in where["buffers"].items() if most)
    console.print(f"{model} on {where['device']}, {where['system']}, {versions}{buffers}")
    console.print(table_of(figures))
    for measured in figures:
        if measured.failed:
            console.print(f"{counted(measured.rows, 'row')}, {_name(measured)}: {measured.failed}")
    for form in forms:
        console.print(str(form), markup=False, highlight=False)


def report_of(benchmark: Benchmark, model: str, complete: bool) -> dict[str, Any]:
    """All figures, and the depth that `auto` settled on by rows, for a file of results."""
    figures = benchmark.figures
    return {
        "what": "omlx-worker bench",
        **machine(),
        "model": model,
        "dtype": benchmark.dtype,
        "weights": benchmark.weight_bytes,
        "forms": [asdict(form) for form in benchmark.forms],
        "slow": benchmark.slow,
        "complete": complete,
        "decoding": [measured.to_json() for measured in figures],
        "auto": {str(m.rows): m.depth for m in figures if m.side == AUTO and m.laps},
    }


def without_names(report: Mapping[str, Any], family: str) -> dict[str, Any]:
    """A report for others: it names no user, host or folder.

    A model in a folder is named by its family, and of an error only the type is told: its text
    may hold a path.
    """
    in_a_folder = Path(report["model"]).expanduser().exists()
    faults = [{name: _type(why) for name, why in f["faults"].items()} for f in report["forms"]]
    return {
        **report,
        "model": f"a {family}" if in_a_folder else report["model"],
        "forms": [{**f, "faults": each} for f, each in zip(report["forms"], faults, strict=True)],
        "decoding": [{**side, "failed": _type(side["failed"])} for side in report["decoding"]],
    }


def _type(error: str) -> str:
    return error.partition(":")[0]


def table_of(figures: Sequence[Measured]) -> Table:
    """A table of at most 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    measured_ones = (measured for measured in figures if measured.laps)
    for rows, line in itertools.groupby(measured_ones, lambda measured: measured.rows):
        for place, measured in enumerate(line):
            table.add_row("" if place else str(rows), *_cells(measured))
        table.add_section()
    return table


def _cells(measured: Measured) -> list[str]:
    ratio = f"{statistics.median(measured.ratios):.2f}" if measured.ratios else "-"
    return [
        _name(measured),
        f"{statistics.median(measured.laps):.0f}",
        ratio,
        f"{1000 * measured.seconds / measured.steps:.2f}",
        f"{measured.tokens / measured.row_steps:.2f}",
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
