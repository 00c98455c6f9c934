"""Keeps the Mac that a worker runs on from idle sleep."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from subprocess import Popen
from typing import Any

log = logging.getLogger("omlx_worker.mac")

ON_MAC = sys.platform == "darwin"


def _start(command: Sequence[str]) -> Popen[bytes]:
    # Without files to close Python forks nothing: it spawns.
    return Popen(command, close_fds=False)


class Mac:
    """What a worker minds of its Mac.

    Args:
        allow_sleep: let it sleep while rows run.
        start: starts a command of macOS.
    """

    def __init__(
        self,
        *,
        allow_sleep: bool = not ON_MAC,
        start: Callable[[Sequence[str]], Popen[Any]] = _start,
    ) -> None:
        self._allow_sleep = allow_sleep
        self._start = start
        self._caffeinate: Popen[Any] | None = None

    def keep_awake(self, busy: bool) -> None:
        """Keep the machine from idle sleep while rows run."""
        if busy and not (self._allow_sleep or self._caffeinate):
            # It also ends with this process, however that ends.
            command = ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())]
            try:
                self._caffeinate = self._start(command)
            except OSError as error:
                log.warning("cannot keep this Mac awake: %s", error)
                self._allow_sleep = True
        elif self._caffeinate and not busy:
            self._caffeinate.terminate()
            self._caffeinate.wait()
            self._caffeinate = None
