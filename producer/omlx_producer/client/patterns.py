"""Patterns of JSON schemas, which are ECMAScript's, as llguidance has them, which are Rust's."""

from __future__ import annotations

import re
from collections.abc import Iterator

_SPACE = r"\t\n\x0b\x0c\r\p{Zs}\u{2028}\u{2029}\u{feff}"
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_NONE = r"[^\s\S]"
_ATOM = r"\\(?:[pP]\{[^}]*\}|u\{[^}]*\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|.)|."
_PARTS = re.compile(rf"\[(?P<class>\^?(?:\\.|[^\\\]])*)\]|{_ATOM}", re.DOTALL)
_ITEMS = re.compile(rf"({_ATOM})(?:-({_ATOM}))?", re.DOTALL)
_OPERATORS = "[&-~^"
"""Of Rust's classes. Elsewhere they are letters, or begin and end a range."""


def exact_pattern(pattern: str) -> str:
    """The pattern for llguidance. What cannot be read is left to it, which refuses it."""
    return "".join(_translated(pattern))


def _translated(pattern: str) -> Iterator[str]:
    for part in _PARTS.finditer(pattern):
        if (held := part["class"]) is not None:
            yield _class(held)
        elif part[0] in (r"\s", r"\S"):
            yield _class(part[0])
        elif part[0] == "\\":
            # llguidance would drop a last backslash. Such an escape it refuses.
            yield r"\c"
        else:
            yield _ANY if part[0] == "." else part[0]


def _class(held: str) -> str:
    """A class of characters, by what its brackets hold."""
    items = held.removeprefix("^")
    made = "".join(
        _letter(item[1]) + (f"-{_letter(item[2])}" if item[2] else "")
        for item in _ITEMS.finditer(items)
    )
    return f"[{'^' * (items != held)}{made or _NONE}]"


def _letter(written: str) -> str:
    if written == r"\s":
        return _SPACE
    if written == r"\S":
        return f"[^{_SPACE}]"
    return f"\\{written}" if written in _OPERATORS else written
