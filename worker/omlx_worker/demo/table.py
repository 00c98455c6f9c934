"""The demo's table: a CSV of twelve rows becomes columns of a schema, by ``omlx-submit run``."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from omlx_producer.bulk.output import results_path

SOURCE, SCHEMA, OUTPUT = "releases.csv", "release.json", "table.csv"
TEMPLATE = "assert to_json({call}) == "
LOOK_SECONDS = 0.1

COMMAND = [
    *("omlx-submit", "run", SOURCE, "-o", OUTPUT),
    *("--template", TEMPLATE, "--json-schema", SCHEMA),
]
_PROGRAM = "from omlx_producer.cli.main import main; main()"

Cells = dict[str, str]


def run_table(console: Console, url: str, folder: Path) -> None:
    """Run the command, show its rows as they end, then the file that it wrote.

    Raises:
        click.ClickException: with the last line of the command, if it fails.
    """
    for name in (SOURCE, SCHEMA):
        data = files("omlx_worker.demo").joinpath("data", name).read_bytes()
        (folder / name).write_bytes(data)
    columns = list(json.loads((folder / SCHEMA).read_text())["properties"])
    calls = {row["id"]: row["call"] for row in _read_csv(folder / SOURCE)}
    console.print(f"\n$ {shlex.join(COMMAND)}", style="bold", markup=False, highlight=False)
    with (folder / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *COMMAND[1:], "--redis-url", url, "--progress=none"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
        try:
            _follow(console, columns, calls, results_path(folder / OUTPUT), process)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        last = (folder / "run.log").read_text(errors="replace").strip().rpartition("\n")[2]
        raise click.ClickException(f"omlx-submit run ended with {process.returncode}: {last}")
    answers = {row["custom_id"]: row for row in _read_csv(folder / OUTPUT)}
    console.print(draw(columns, calls, answers))


def draw(columns: list[str], calls: Cells, answers: dict[str, Cells]) -> Table:
    """The input's texts and, beside them, the answers so far."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("call", style="dim")
    for column in columns:
        widest = max(len(row.get(column, "")) for row in ({column: column}, *answers.values()))
        table.add_column(column, min_width=widest, no_wrap=True, style="green")
    for number, call in calls.items():
        # Only a column that may wrap makes room for the others.
        text = Text(call, no_wrap=True, overflow="ellipsis")
        table.add_row(text, *(answers.get(number, {}).get(column, "…") for column in columns))
    return table


def _follow(
    console: Console,
    columns: list[str],
    calls: Cells,
    results: Path,
    process: subprocess.Popen[bytes],
) -> None:
    """Show the rows until the command ends."""

    def frame() -> Table:
        return draw(columns, calls, _read_results(results))

    if not console.is_terminal:
        process.wait()
        return
    with Live(console=console, get_renderable=frame, refresh_per_second=8, transient=True):
        while process.poll() is None:
            time.sleep(LOOK_SECONDS)


def _read_csv(path: Path) -> list[Cells]:
    with path.open(newline="") as lines:
        return list(csv.DictReader(lines))


def _read_results(path: Path) -> dict[str, Cells]:
    """The answers in a file of results that may still be written."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
            answer = json.loads(row["response"]["body"]["choices"][0]["text"])
            found[row["custom_id"]] = {name: str(value) for name, value in answer.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            continue
    return found
