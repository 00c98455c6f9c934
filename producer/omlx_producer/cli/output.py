"""What the command line prints: data on stdout, each piece as it comes."""

from __future__ import annotations

from typing import Any

import click

from omlx_producer.protocol import TokenEvent, TokensEvent


class TextWriter:
    """Writes the first choice as it comes, and the others whole after it.

    Attributes:
        wrote: whether there was any text.
    """

    def __init__(self) -> None:
        self.wrote = False
        self._others: dict[int, list[str]] = {}
        self._at_line_start = True

    def write(self, event: TokenEvent) -> None:
        if not isinstance(event, TokensEvent):
            return
        for choice in event.choices:
            if choice.index == 0:
                self._put(choice.text)
            else:
                self._others.setdefault(choice.index, []).append(choice.text)

    def write_body(self, body: dict[str, Any]) -> None:
        """Write a result instead of events."""
        for choice in body["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            if choice["index"] == 0:
                self._put(text)
            else:
                self._others[choice["index"]] = [text]

    def end(self) -> None:
        """Write the other choices, and end the last line."""
        for index, pieces in sorted(self._others.items()):
            self._end_line()
            self._put(f"--- choice {index} ---\n")
            self._put("".join(pieces))
        self._end_line()

    def _put(self, text: str) -> None:
        if text:
            click.echo(text, nl=False)
            self.wrote = True
            self._at_line_start = text.endswith("\n")

    def _end_line(self) -> None:
        if not self._at_line_start:
            click.echo()
            self._at_line_start = True
