"""The demo's jobs on a screen: a panel each on a terminal, whole lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from omlx_producer.protocol import DoneEvent, TerminalEvent
from omlx_producer.wording import counted
from omlx_worker.demo.prompts import Prompt

MIN_WIDTH, MAX_WIDTH = 38, 60
MIN_HEIGHT, MAX_HEIGHT = 3, 11
MAX_COLUMNS = 4
BORDER = 2
LOOK_SECONDS = 0.05


@dataclass(slots=True)
class Shown:
    """A prompt and the text generated so far."""

    number: int
    prompt: Prompt
    generated: str = ""
    tokens: int = 0
    end: TerminalEvent | None = None

    @property
    def title(self) -> str:
        kind = f"{self.prompt.kind}, " if self.prompt.kind else ""
        return f"{self.number}: {kind}{counted(self.tokens, 'token')}"

    @property
    def text(self) -> str:
        return self.prompt.text + self.generated

    @property
    def failed(self) -> bool:
        return not isinstance(self.end, DoneEvent)


def follow(shown: list[Shown], running: Callable[[], bool]) -> None:
    """Show the jobs until they run no more."""
    console = Console()
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        Panels(shown, console).follow(running)
    else:
        _Lines(shown).follow(running)


class Panels:
    """A panel for each prompt, as many in a row as the terminal has room for."""

    def __init__(self, shown: list[Shown], console: Console) -> None:
        self._shown = shown
        self._console = console

    def follow(self, running: Callable[[], bool]) -> None:
        with Live(console=self._console, get_renderable=self.draw, refresh_per_second=12):
            while running():
                time.sleep(LOOK_SECONDS)

    def draw(self) -> Table:
        """The frame of this moment, no higher than the terminal if that has 80 by 24."""
        screen = self._console.size
        columns = min(MAX_COLUMNS, max(1, screen.width // MIN_WIDTH))
        rows = -(-len(self._shown) // columns)
        # Two lines stay free, for the cursor and a line above.
        height = min(MAX_HEIGHT, max(MIN_HEIGHT, (screen.height - 2) // rows))
        width = min(MAX_WIDTH, screen.width // columns)
        grid = Table.grid()
        for start in range(0, len(self._shown), columns):
            row = self._shown[start : start + columns]
            grid.add_row(*(self._panel(entry, width, height) for entry in row))
        return grid

    def _panel(self, entry: Shown, width: int, height: int) -> Panel:
        lines = entry.text.splitlines()[BORDER - height :]
        style = "red" if entry.end and entry.failed else "green" if entry.end else "cyan"
        return Panel(
            Text("\n".join(lines), no_wrap=True, overflow="ellipsis"),
            title=entry.title,
            width=width,
            height=height,
            border_style=style,
        )


class _Lines:
    """Whole lines as they are complete, after the job's number."""

    def __init__(self, shown: list[Shown]) -> None:
        self._shown = shown
        self._written = [0] * len(shown)

    def follow(self, running: Callable[[], bool]) -> None:
        while running():
            self._write(to_the_end=False)
            time.sleep(LOOK_SECONDS)
        self._write(to_the_end=True)

    def _write(self, *, to_the_end: bool) -> None:
        for index, entry in enumerate(self._shown):
            text = entry.text if entry.tokens or entry.end else ""
            end = len(text) if to_the_end or entry.end else text.rfind("\n") + 1
            for line in text[self._written[index] : end].splitlines():
                click.echo(f"{entry.number} | {line}")
            self._written[index] = max(self._written[index], end)
