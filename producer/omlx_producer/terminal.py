"""Text for people: foreign text is escaped on a terminal, and unchanged elsewhere."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_IN_TEXT = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\n\t"}


def write(text: str, *, err: bool = False) -> None:
    """Write text to stdout or stderr, and flush it.

    A terminal gets control characters escaped, as in ``\\x1b``, except newline and tab. Anything
    else gets the text in UTF-8, unchanged; half a surrogate pair, which UTF-8 lacks, is escaped.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        text = text.translate(_IN_TEXT)
        if err:
            # Not into the buffer: a live display takes the stream's place and writes above itself.
            stream.write(text)
            stream.flush()
            return
    stream.flush()
    stream.buffer.write(text.encode("utf-8", "backslashreplace"))
    stream.buffer.flush()


def one_cell(text: str) -> str:
    """Text for one cell of a table: all control characters are escaped, newline and tab too."""
    return text.translate(_CONTROLS)


def counted(count: int, noun: str) -> str:
    """``counted(1, "row")`` is ``1 row``, ``counted(2, "row")`` is ``2 rows``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def local_time(moment: datetime | float) -> str:
    """A moment, or seconds since 1970, in this machine's time zone."""
    if not isinstance(moment, datetime):
        moment = datetime.fromtimestamp(moment, UTC)
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"
