"""The file beside an output that holds the id and the options of its run.

It is also the lock that keeps two clients off one output. The system releases the lock when the
process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from omlx_producer.bulk.journal import copy_mode, lock, naming, sync_file, sync_folder


def run_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.run")


def read_settings(output: Path) -> Any:
    """The options of the run that wrote an output, whatever its version; None if no run did."""
    try:
        with run_path(output).open("rb") as stream:
            return _read(stream).get("settings") or None
    except (FileNotFoundError, NotADirectoryError):
        return None


def new_run_id() -> str:
    return secrets.token_hex(6)


@dataclass
class RunFile:
    """The file of one run, open and locked.

    Attributes:
        run: the id of the run, 12 hexadecimal digits. A resumed run keeps it.
        settings: the options of the run; see `omlx_producer.bulk.run.RunOptions`.
        seconds: how long the run has taken so far, without pauses between its commands.
    """

    run: str
    settings: Any = None
    seconds: float = 0.0

    @classmethod
    @contextlib.contextmanager
    def open(cls, output: Path) -> Iterator[RunFile]:
        """Open or make the file, and hold its lock inside the block.

        Raises:
            InvalidRequest: if another process holds the lock.
        """
        path = run_path(output)
        new = not path.exists()
        path.touch()
        with path.open("r+b") as stream:
            lock(stream, output)
            if new:
                copy_mode(output, stream)
            found = _read(stream)
            run, seconds = found.get("run"), found.get("seconds")
            run_file = cls(
                run if isinstance(run, str) and run else new_run_id(),
                found.get("settings"),
                seconds if isinstance(seconds, int | float) else 0.0,
            )
            run_file._stream = stream
            if not found:
                # Before the first job: a lost id would lose the jobs.
                run_file.save()
                sync_folder(path.parent)
            yield run_file

    def remember(self, settings: dict[str, Any]) -> None:
        """Make these settings durable, if they are others."""
        if self.settings != settings:
            self.settings = settings
            self.save()

    def spent(self, seconds: float) -> None:
        """Make durable how long the run has taken so far."""
        self.seconds = seconds
        self.save()

    def save(self) -> None:
        """Make run and settings durable."""
        fields = {"run": self.run, "settings": self.settings, "seconds": round(self.seconds, 2)}
        document = json.dumps(fields, indent=2).encode()
        size = self._stream.seek(0, os.SEEK_END)
        self._stream.seek(0)
        with naming(Path(self._stream.name)):
            # Over the whole old document, so that a kill leaves the one or the other.
            self._stream.write(document.ljust(size - 1) + b"\n")
            self._stream.flush()
            self._stream.truncate(len(document) + 1)
            sync_file(self._stream.fileno())

    _stream: IO[bytes] = field(init=False, repr=False)


def _read(stream: IO[bytes]) -> dict[str, Any]:
    """The document; empty if there is none or a power cut tore it."""
    stream.seek(0, os.SEEK_SET)
    try:
        document = json.loads(stream.read())
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
