"""The process of one of several models, as its parent sees it; see `omlx_worker.model_main`."""

from __future__ import annotations

import os
import subprocess
import threading
from typing import Any

from pydantic import BaseModel

from omlx_producer.terminal import write
from omlx_worker.control.status import Turn
from omlx_worker.logs import log_again
from omlx_worker.processes import Child, how_ended, python_command
from omlx_worker.queue.embedded import free_port
from omlx_worker.settings import HTTP_HOST, WorkerSettings

# To give its rows back once the worker has gone.
END_SECONDS = 1
VARIABLE, _SENTENCE = "OMLX_MODEL_PROCESS", "omlx-worker: "


class Order(BaseModel):
    """What a process is to serve.

    Attributes:
        settings: all fields of `WorkerSettings`, so that no variable changes one.
        url: of Redis.
    """

    settings: dict[str, Any]
    url: str
    turn: Turn


class ModelProcess:
    """A process that serves a model. It ends with this one, and Ctrl-C does not reach it.

    Args:
        url: of Redis.

    Attributes:
        sentence: why it has ended.
        metrics_url: of its metrics; empty if it serves none.
    """

    def __init__(self, url: str, settings: WorkerSettings, turn: Turn) -> None:
        self.sentence = ""
        port = None if settings.metrics_port is None else free_port()
        self.metrics_url = f"http://{HTTP_HOST}:{port}/metrics" if port else ""
        own = {
            "http": None,
            "embedded_redis": False,
            "log_file": None,
            "metrics_host": HTTP_HOST,
            "metrics_port": port,
        }
        order = Order(settings=settings.model_dump(mode="json") | own, url=url, turn=turn)
        self._child = Child(
            python_command("omlx_worker.model_main", "omlx-worker"),
            seconds=END_SECONDS,
            stderr=subprocess.PIPE,
            # The URL may hold a password, which other users would see among the arguments.
            env={**os.environ, VARIABLE: order.model_dump_json()},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stderr is not None
        with self._child.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                if text.startswith(_SENTENCE):
                    self.sentence = text.removeprefix(_SENTENCE)
                elif not log_again(text):
                    write(f"{text}\n", err=True)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if (code := self._child.code) is not None:
            # What it has started itself may hold its stderr open.
            self._reader.join(1)
            self._child.end()
            self.sentence = self.sentence or f"its process {how_ended(code)}"
        return code

    def terminate(self) -> None:
        """Tell it to drain; the second time, to end at once."""
        self._child.terminate()

    def kill(self) -> None:
        """End it now."""
        self._child.end()
