"""A worker as a child of a command, from its start until nobody uses it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO
from urllib.parse import quote

from omlx_producer.environment import PREFIX
from omlx_worker.processes import Child, how_ended, python_command, wait_until
from omlx_worker.settings import WorkerSettings

END_SECONDS, END_AT_ONCE_SECONDS = 15.0, 0.5
_SENTENCE = "omlx-worker: "


class WorkerEnded(RuntimeError):
    """The worker has ended while it was needed. The message is its own sentence if it has left one.

    Attributes:
        code: what it ended with; negative for a signal.
        loading: whether it had not loaded its model.
    """

    def __init__(self, code: int, last: str, log: Path, *, loading: bool) -> None:
        self.code = code
        self.loading = loading
        sentence = last.removeprefix(_SENTENCE) if last.startswith(_SENTENCE) else None
        super().__init__(sentence or f"the worker {how_ended(code)}; its log is {log}")


class OwnWorker:
    """``omlx-worker run`` as a child.

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
            self._child = Child(
                python_command(
                    "omlx_worker.cli",
                    "omlx-worker",
                    *("run", "--log-file", str(self._log.resolve()), *arguments),
                ),
                output,
                seconds=0,
                env={**os.environ, **{PREFIX + name: value for name, value in names.items()}},
                pass_fds=[runs.fileno()],
            )

    def require_running(self) -> None:
        """Raise WorkerEnded if it is not."""
        if (code := self._child.code) is not None:
            raise WorkerEnded(code, self._child.last_line, self._log, loading=self._loading)

    def wait(self, progress: Callable[[], str | None], show: Callable[[str], object]) -> None:
        """Wait while it loads its model.

        Args:
            progress: what it does now, empty if that is not known; None once it serves.
            show: told the progress.

        Raises:
            WorkerEnded: see `require_running`.
        """

        def serves() -> bool:
            if (told := progress()) is not None:
                show(told)
            return told is None

        wait_until(serves, self.require_running)
        self._loading = False

    def end(self, *, at_once: bool) -> None:
        """Let it finish its rows, or give them back."""
        self._child.end(END_AT_ONCE_SECONDS if at_once else END_SECONDS, END_SECONDS)
