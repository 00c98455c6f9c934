"""Text for people: foreign text is escaped on a terminal, and unchanged elsewhere."""

from __future__ import annotations

import re
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


def without_counts(text: str) -> str:
    """A sentence without its numbers, ``1 job`` and ``2 jobs`` included."""
    return re.sub("[0-9]+( jobs?)?", "", text)


def local_time(moment: datetime | float) -> str:
    """A moment, or seconds since 1970, in this machine's time zone."""
    if not isinstance(moment, datetime):
        moment = datetime.fromtimestamp(moment, UTC)
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}"


def duration(seconds: float) -> str:
    """Seconds in the units that people use."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def in_units(count: int) -> str:
    """Bytes for people: ``in_units(3 * 2**29)`` is ``1.5 GiB``."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit in ("B", "KiB") else f"{amount:.1f} {unit}"


def percent(share: float | None) -> str:
    """``75%``, or a dash if there is none."""
    return "-" if share is None else f"{share:.0%}"
