"""The demo's jobs on a screen: a panel each on a terminal, whole lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from omlx_producer.terminal import counted
from omlx_worker.demo.play import Play, Shown

MIN_WIDTH, MAX_WIDTH = 38, 60
MIN_HEIGHT, MAX_HEIGHT = 3, 11
MAX_COLUMNS = 4
BORDER = 2
FOOTER = 2
LOOK_SECONDS = 0.1

DRAFTED, LOST = "bold green", "bold red"
WORKERS = ("cyan", "magenta")
LEGEND = Text.assemble("dim: prompt, plain: the model, ", ("green: accepted drafts", DRAFTED))


def follow(play: Play, running: Callable[[], bool]) -> None:
    """Show the jobs until they run no more."""
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        Panels(play, console).follow(running)
    else:
        _Lines(play).follow(running)


class Panels:
    """A panel for each prompt, as many in a row as the terminal has room for."""

    def __init__(self, play: Play, console: Console) -> None:
        self._play = play
        self._console = console
        self._colours = {
            member.name: colour for member, colour in zip(play.crew.members, WORKERS, strict=False)
        }

    def follow(self, running: Callable[[], bool]) -> None:
        with Live(console=self._console, get_renderable=self.draw, refresh_per_second=12):
            while running():
                time.sleep(LOOK_SECONDS)

    def draw(self) -> RenderableType:
        """The frame of this moment, no higher than the terminal if that has 80 by 24."""
        screen, shown = self._console.size, self._play.shown
        columns = min(MAX_COLUMNS, max(1, screen.width // MIN_WIDTH))
        rows = -(-len(shown) // columns)
        # One line stays free, for the cursor.
        height = min(MAX_HEIGHT, max(MIN_HEIGHT, (screen.height - 1 - FOOTER) // rows))
        width = min(MAX_WIDTH, screen.width // columns)
        grid = Table.grid()
        for start in range(0, len(shown), columns):
            row = shown[start : start + columns]
            grid.add_row(*(self._panel(entry, width, height) for entry in row))
        return Group(grid, self._workers(), self._notice())

    def _panel(self, entry: Shown, width: int, height: int) -> Panel:
        text = Text()
        text.append(entry.prompt.text, "dim")
        for piece, drafted in list(entry.pieces):
            text.append(piece, DRAFTED if drafted else "")
        lines = text.split("\n", allow_blank=False)[BORDER - height :]
        return Panel(
            Text("\n", no_wrap=True, overflow="ellipsis").join(lines),
            title=entry.title,
            subtitle=entry.place,
            width=width,
            height=height,
            border_style=self._border(entry),
        )

    def _border(self, entry: Shown) -> str:
        if entry.end:
            return "red" if entry.failed else "green"
        if entry.moved_at is not None and not entry.worker:
            return LOST
        return self._colours.get(entry.worker, "dim")

    def _workers(self) -> Text:
        alive = {member.name: member.pid for member in self._play.crew.members}
        parts = Text(no_wrap=True, overflow="ellipsis")
        for name, colour in self._colours.items():
            jobs = [e for e in self._play.shown if e.worker == name and not e.end]
            state = f"pid {alive[name]}, {counted(len(jobs), 'job')}" if name in alive else "killed"
            parts.append(f"worker {name}: {state}   ", colour if name in alive else LOST)
        return parts

    def _notice(self) -> Text:
        if not self._play.notice:
            return LEGEND
        return Text(self._play.notice, "bold yellow", no_wrap=True, overflow="ellipsis")


class _Lines:
    """Whole lines as they are complete, after the job's number."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._written = [0] * len(play.shown)
        self._notice = ""

    def follow(self, running: Callable[[], bool]) -> None:
        while running():
            self._write(to_the_end=False)
            time.sleep(LOOK_SECONDS)
        self._write(to_the_end=True)

    def _write(self, *, to_the_end: bool) -> None:
        if self._play.notice != self._notice:
            self._notice = self._play.notice
            click.echo(self._notice)
        for index, entry in enumerate(self._play.shown):
            text = entry.text if entry.tokens or entry.end else ""
            end = len(text) if to_the_end or entry.end else text.rfind("\n") + 1
            for line in text[self._written[index] : end].splitlines():
                click.echo(f"{entry.number} | {line}")
            self._written[index] = max(self._written[index], end)
