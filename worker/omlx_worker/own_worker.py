"""A worker as a child of a command, from its start until nobody uses it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO
from urllib.parse import quote

from omlx_producer.environment import PREFIX
from omlx_worker.processes import child_command
from omlx_worker.settings import WorkerSettings

LOOK_SECONDS = 0.2
END_SECONDS, END_AT_ONCE_SECONDS = 15.0, 0.5
_SENTENCE = "omlx-worker: "


class WorkerEnded(RuntimeError):
    """The worker has ended while it was needed. The message is its own sentence if it has left one.

    Attributes:
        code: what it ended with; negative for a signal.
        loading: whether it had not loaded its model.
    """

    def __init__(self, code: int, log: Path, *, loading: bool) -> None:
        self.code = code
        self.loading = loading
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        sentence = last.removeprefix(_SENTENCE) if last.startswith(_SENTENCE) else None
        super().__init__(sentence or f"the worker {how}; its log is {log}")


class OwnWorker:
    """``omlx-worker run`` in a process that ends with this one, and that Ctrl-C does not reach.

    Args:
        arguments: its options.
        url: of Redis. It may hold a password, which other users would see among the arguments.
        runs: a file that it holds open as long as it lives; see `shared`.
    """

    def __init__(
        self, settings: WorkerSettings, arguments: Iterable[str], url: str, runs: IO[bytes]
    ) -> None:
        self._log = settings.state_dir / f"batch-{quote(settings.alias, safe='')}.log"
        self._loading = True
        self._log.parent.mkdir(parents=True, exist_ok=True)
        names = {"REDIS_URL": url, "EMBEDDED_REDIS": "false", "BURST": "false"}
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                child_command(
                    "omlx_worker.cli",
                    "omlx-worker",
                    *("run", "--log-file", str(self._log.resolve()), *arguments),
                    seconds=0,
                ),
                stdin=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **{PREFIX + name: value for name, value in names.items()}},
                start_new_session=True,
                pass_fds=[runs.fileno()],
            )

    def require_running(self) -> None:
        """Raise WorkerEnded if it is not."""
        if (code := self._process.poll()) is not None:
            raise WorkerEnded(code, self._log, loading=self._loading)

    def wait(self, progress: Callable[[], str | None], show: Callable[[str], object]) -> None:
        """Wait while it loads its model.

        Args:
            progress: what it does now, empty if that is not known; None once it serves.
            show: told the progress.

        Raises:
            WorkerEnded: see `require_running`.
        """
        while (told := progress()) is not None:
            self.require_running()
            show(told)
            time.sleep(LOOK_SECONDS)
        self._loading = False

    def end(self, *, at_once: bool) -> None:
        """Let it finish its rows, or give them back."""
        for patience in (END_AT_ONCE_SECONDS if at_once else END_SECONDS, END_SECONDS):
            self._process.terminate()
            try:
                self._process.wait(patience)
                return
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()
