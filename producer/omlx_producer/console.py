"""The console that draws tables."""

from __future__ import annotations

from rich.console import Console


class TableConsole(Console):
    """A console that leaves a broken pipe, and the exit code for it, to the program."""

    def on_broken_pipe(self) -> None:
        raise
