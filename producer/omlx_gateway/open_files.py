"""How many files this process may open: each connection is one."""

from __future__ import annotations

import contextlib
import resource

FILES_PER_CONNECTION = 4
"""Itself and a file that is sent over it. The others are for new connections and for Redis."""
USUAL_FILES = 10_240
"""The most that macOS grants to a process without a hard limit."""
_BACKLOG = 2048


def allow_files(connections: int) -> int:
    """Raise the soft limit towards the hard one; returns how many files may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(USUAL_FILES, FILES_PER_CONNECTION * connections)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    for files in (wanted, USUAL_FILES):
        most = files if hard == resource.RLIM_INFINITY else min(files, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
            return max(soft, most)
    return soft


def backlog_of(files: int) -> int:
    """Connections that wait for the server. The event loop accepts them all at once.

    It does so four times before the first of them can make room for the others.
    """
    return min(_BACKLOG, files // 8)
