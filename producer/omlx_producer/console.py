"""The console that draws tables and bars."""

from __future__ import annotations

import os

from rich.console import Console


class TableConsole(Console):
    """A console that leaves a broken pipe, and the exit code for it, to the program.

    A width or height of 0 in the environment is one that is not known.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        sizes = ("COLUMNS", "LINES")
        known = {k: v for k, v in os.environ.items() if k not in sizes or v.strip("0")}
        super().__init__(stderr=stderr, _environ=known)

    def on_broken_pipe(self) -> None:
        raise
