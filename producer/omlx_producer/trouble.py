"""Redis away, or unable to write: which errors pass by themselves."""

from __future__ import annotations

from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

# The same call may succeed later.
TROUBLE = (
    ConnectionError,
    TimeoutError,
    OutOfMemoryError,
    ReadOnlyError,
    ClusterDownError,
    TryAgainError,
)
# The same, for errors that redis-py has no class for, and for servers that wrap a script's error.
_PASSING_CODES = ("MISCONF ", "BUSY ", "NOREPLICAS ", "OOM ", "READONLY ")
# What redis-py puts before an error in a pipeline, behind the command, which may say anything.
_PIPELINE = "of pipeline caused error: "


def passes(error: BaseException) -> bool:
    """Whether a call that raised this error may succeed later."""
    if isinstance(error, TROUBLE):
        return True
    if not isinstance(error, ResponseError):
        return False
    said = str(error).rpartition(_PIPELINE)[2]
    return any(code in said for code in _PASSING_CODES)
