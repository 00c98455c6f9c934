"""What a gateway takes, at most. The command reads it where the extra is not installed, too."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY_BYTES = 64 * 2**20
SMALL_BODY_BYTES = 64 * 2**10
"""The server holds this much of each body anyway. Only bytes beyond it count as held."""
MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Limits:
    """What a gateway takes.

    Attributes:
        body_bytes: of a request, at most.
        file_bytes: of an upload, at most.
    """

    body_bytes: int = MAX_BODY_BYTES
    file_bytes: int = MAX_FILE_BYTES

    @property
    def held_bytes(self) -> int:
        """Of all bodies that are not jobs yet, beside `SMALL_BODY_BYTES` of each."""
        return 2 * self.body_bytes
