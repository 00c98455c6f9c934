"""Processes of this machine: programs as children, which end with this process however it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The parent holds the other end of stdin, which closes however the parent ends.
_PROGRAM = """
import os, signal, threading, time

def end_with_parent():
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep({seconds})
    os._exit(1)

threading.Thread(target=end_with_parent, daemon=True).start()
from {module} import main
main(prog_name="{name}")
"""


def child_command(module: str, name: str, *arguments: str, seconds: float) -> list[str]:
    """The command of a program whose stdin is a pipe of this process.

    Args:
        module: that has its ``main``.
        name: of the program.
        seconds: between SIGTERM and its end once this process has gone.
    """
    program = _PROGRAM.format(module=module, name=name, seconds=seconds)
    return [sys.executable, "-P", "-c", program, *arguments]


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
