"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """``counted(1, "row")`` is ``1 row``, ``counted(2, "row")`` is ``2 rows``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
