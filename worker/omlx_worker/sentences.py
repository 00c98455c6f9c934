"""Sentences for users, and parts of them."""

from __future__ import annotations

LONGEST_SENTENCE = 1000


def in_rows(count: int) -> str:
    """So many rows, in words."""
    return "1 row" if count == 1 else f"{count} rows"


def one_line(text: str) -> str:
    """A sentence as it can be stored and shown, whatever the job had in the place it quotes."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    return line if len(line) <= LONGEST_SENTENCE else line[: LONGEST_SENTENCE - 3] + "..."
