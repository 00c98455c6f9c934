"""Processes of this machine: programs as children, which end with this process however it ends."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

LOOK_SECONDS = 0.05

# The parent holds the other end of stdin, which closes however the parent ends. The program has
# the id of this shell. What waits for the end is in its process group, so that no other process
# gets the id of the group.
_BESIDE = """
exec 3<&0 </dev/null
(trap '' TERM; read -r _ <&3; kill -TERM 0; sleep "$0"; kill -KILL 0) >/dev/null 2>&1 &
exec "$@" 3<&-
"""

_Thing = TypeVar("_Thing")


class Child:
    """A program that ends with this process, and that Ctrl-C in the terminal does not reach.

    Args:
        log: takes its output; without it this process's stdout and stderr do.
        seconds: between SIGTERM and SIGKILL once this process has gone.
        options: of `subprocess.Popen`; they go before the others.

    Attributes:
        stderr: what it writes there, if that is a pipe.
    """

    def __init__(
        self, command: Sequence[str], log: IO[bytes] | None = None, *, seconds: int, **options: Any
    ) -> None:
        self._log = Path(log.name) if log else None
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _BESIDE, str(seconds), *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
            **{"stdout": log, "stderr": log, **options},
        )
        self.pid, self.stderr = self._process.pid, self._process.stderr

    @property
    def code(self) -> int | None:
        """What it has ended with, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        assert self._log is not None
        return self._log.read_text(errors="replace").strip().rpartition("\n")[2]

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def wait(self) -> int:
        """Wait for its end; returns its code."""
        return self._process.wait()

    def end(self, *patience: float) -> None:
        """Ask it to end, once for each of these times in seconds; then kill it."""
        for seconds in patience:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                break
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()


def how_ended(code: int) -> str:
    """A code of a process in words, such as "was killed by signal 9"."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def python_command(module: str, name: str, *arguments: str) -> list[str]:
    """The command of a program in Python, of the module that has its ``main``."""
    program = f"import sys; sys.argv[0] = '{name}'; from {module} import main; main()"
    return [sys.executable, "-P", "-c", program, *arguments]


def wait_until(
    look: Callable[[], _Thing],
    check: Callable[[], object] = lambda: None,
    seconds: float = math.inf,
) -> _Thing:
    """Wait until ``look`` returns something true, for these seconds at most.

    Returns what it returned last.

    Args:
        check: raises if that will not come.
    """
    deadline = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < deadline:
        check()
        time.sleep(LOOK_SECONDS)
    return found


def lives(pid: int) -> bool:
    """Whether another process on this machine has this id and has not ended.

    In a restarted container this process may have the id of a dead one.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid() and not _waits_for_parent(pid)


def _waits_for_parent(pid: int) -> bool:
    """Whether a process has ended and its parent has not asked how, which some containers never do.

    On macOS, where launchd asks at once, always False.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name before it is in parentheses and may hold any character.
    return status.rpartition(") ")[2].startswith("Z")
