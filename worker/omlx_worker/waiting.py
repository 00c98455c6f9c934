"""What a command shows while it waits for a model: a line with a spinner on a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator

import click
from rich.text import Text

from omlx_producer.bulk.progress import Style
from omlx_producer.console import TableConsole
from omlx_producer.terminal import duration, one_cell


@contextlib.contextmanager
def shown(style: Style, model: str) -> Iterator[Callable[[str], object]]:
    """Show on stderr that a model is being loaded, in the style of the run that waits for it.

    Yields a function that is told, again and again, what happens beside that; empty for nothing.
    """
    if style == "none":
        yield lambda _: None
    elif style == "bar" or (style == "auto" and sys.stderr.isatty()):
        began = time.monotonic()
        with TableConsole(stderr=True).status(_line(model, 0, "")) as status:
            yield lambda beside: status.update(_line(model, time.monotonic() - began, beside))
    else:
        click.echo(json.dumps({"type": "loading", "model": model}), err=True)
        yield lambda _: None


def _line(model: str, seconds: float, beside: str) -> Text:
    text = f"loading {model}, {duration(seconds)}" + f": {beside}" * bool(beside)
    return Text(one_cell(text), no_wrap=True, overflow="ellipsis")
