"""A real Redis-protocol server for tests: started on a free port, stopped by its own process."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import redis

from omlx_worker.queue.embedded import find_server, free_port

START_SECONDS = 10.0


def cut_readers(connection: redis.Redis) -> int:
    """Cut the connections of all blocking reads; returns how many."""
    reading = [each["id"] for each in connection.client_list() if each["cmd"] == "xread"]
    return sum(connection.client_kill_filter(_id=each) for each in reading)


@contextlib.contextmanager
def values_up_to_1_mib(connection: redis.Redis) -> Iterator[None]:
    """Let the server take no longer values. It closes the connection of a call that has one."""
    name = "proto-max-bulk-len"
    usual = connection.config_get(name)[name]
    connection.config_set(name, 2**20)
    try:
        yield
    finally:
        connection.config_set(name, usual)


@dataclass
class RedisServer:
    """A server that can be taken down and brought back on the same port and folder.

    ``options`` are further command line options, such as ``("--appendonly", "yes")``, which a
    test needs for data to survive `kill` and `start`.
    """

    folder: Path
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it answers PING."""
        command = [find_server(), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--dir", str(self.folder), "--save", "", *self.options]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError((self.folder / "server.log").read_text())
            time.sleep(0.01)

    def _answers(self) -> bool:
        """Whether the answer comes from this server, not from another on the same port."""
        assert self.process is not None
        with redis.Redis(port=self.port, retry=None, socket_timeout=1) as client:
            try:
                return bool(client.info("server")["process_id"] == self.process.pid)
            except redis.RedisError:
                return False

    def stop(self) -> None:
        """Ask the server to end, as SIGTERM does; what it keeps on disk is written."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=START_SECONDS)
            self.process = None

    def kill(self) -> None:
        """End the server at once, as kill -9 does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=START_SECONDS)
            self.process = None


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """Run a server for the length of a ``with`` block."""
    with tempfile.TemporaryDirectory(prefix="omlx-redis-") as folder:
        server = RedisServer(Path(folder), options)
        server.start()
        try:
            yield server
        finally:
            server.kill()
