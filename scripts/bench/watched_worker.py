"""A worker whose memory is noted: ``python -m scripts.bench.watched_worker NOTES run OPTIONS``.

`Notes` reads the file NOTES, from any process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omlx_worker.cli import main as run_worker

EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class Note:
    """The memory of a process, in bytes.

    Attributes:
        at: seconds since 1970.
        active, cache: what MLX has in use, and what it keeps for later.
        resident: of the whole process, as the system counts it.
    """

    at: float
    active: int
    cache: int
    resident: int


@dataclass(frozen=True)
class Notes:
    """The file of a `watched_worker`."""

    path: Path

    def parts(self, began: float, ended: float, count: int) -> list[dict[str, Any]]:
        """The maximum of each number in each of `count` equal parts of this time."""
        lines = self.path.read_text().splitlines()
        notes = [Note(*map(_number, line.split())) for line in lines if line.count(" ") == 3]
        width = (ended - began) / count
        parts = [[] for _ in range(count)]
        for note in notes:
            if began <= note.at < ended:
                parts[int((note.at - began) / width)].append(asdict(note))
        return [
            {name: max(note[name] for note in part) for name in part[0]} for part in parts if part
        ]


def _number(word: str) -> Any:
    return float(word) if "." in word else int(word)


def _write(path: Path) -> None:
    with path.open("w", buffering=1) as notes:
        while True:
            # The worker decides how MLX is first imported.
            if mx := sys.modules.get("mlx.core"):
                told = subprocess.run(
                    ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, check=True
                )
                active, cache = mx.get_active_memory(), mx.get_cache_memory()
                notes.write(f"{time.time()} {active} {cache} {1024 * int(told.stdout)}\n")
            time.sleep(EVERY_SECONDS)


def main() -> None:
    path = Path(sys.argv.pop(1))
    threading.Thread(target=_write, args=(path,), daemon=True).start()
    run_worker()


if __name__ == "__main__":
    main()
