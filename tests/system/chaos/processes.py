"""Worker processes as a test holds them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omlx_producer.program import UNREACHABLE

# Of `run_chaos_worker`: there was no server when it started.
UNREACHED = 75
SCRIPT = Path(__file__).with_name("run_chaos_worker.py")


class Nursery:
    """The process that forks workers; see `run_chaos_worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def spawn(self, **orders: Any) -> ChaosWorker:
        return ChaosWorker(self._ask(spawn=orders)["pid"], self)

    def spawn_client(self, **orders: Any) -> ChaosWorker:
        return ChaosWorker(self._ask(client=orders)["pid"], self)

    def poll(self, pid: int) -> tuple[int | None, bool]:
        """The exit code of a worker, if it has ended, and whether it is paused."""
        answer = self._ask(poll=pid)
        return answer["code"], answer["stopped"]

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@dataclass
class ChaosWorker:
    """One process: a worker, or a client.

    Attributes:
        told: the signals that it was sent, which may explain how it ended.
    """

    pid: int
    nursery: Nursery
    told: list[int] = field(default_factory=list)

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.nursery.poll(self.pid)[0]

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def stopped(self) -> bool:
        """Whether it is paused, as SIGSTOP does."""
        return self.nursery.poll(self.pid)[1]

    def send(self, number: int) -> None:
        self.told.append(number)
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    @property
    def explained(self) -> bool:
        """Whether it ended as it was told to, and did not give up by itself."""
        code = self.code
        if code in (-signal.SIGKILL, UNREACHED):
            return True
        ended = (0, 3, 128 + signal.SIGTERM, -signal.SIGTERM)
        return code in ended and signal.SIGTERM in self.told


class Errand:
    """A client process that is started again until it has done what it was told.

    Attributes:
        wrong: how it ended, if that was neither by a kill nor because Redis was away.
    """

    def __init__(self, nursery: Nursery, **orders: Any) -> None:
        self._nursery = nursery
        self._orders = orders
        self._process: ChaosWorker | None = None
        self._lost = False
        self.done = False
        self.wrong = ""

    def __str__(self) -> str:
        return " ".join(self._orders["args"][:1])

    def tend(self) -> None:
        """Start it, or start it again; see whether it is done."""
        if self._process is not None and (code := self._process.code) is not None:
            self._process = None
            self.done = code == 0 and not self._lost
            self._lost = False
            if code not in (0, -signal.SIGKILL, UNREACHABLE):
                self.wrong = f"{self} ended with {code}"
        if self._process is None and not self.done:
            self._process = self._nursery.spawn_client(**self._orders)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def do_again(self) -> None:
        """The server has lost what may have been its work, also that of the running process."""
        self.done, self._lost = False, self._process is not None


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield Nursery(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
