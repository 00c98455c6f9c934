"""What commands of this machine share: which worker serves a model here, and who uses what.

Of several commands that use one thing at a time, the one that has started it ends it, once no other
uses it. Locks of files say who does: a lock ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import click
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from rq import Worker

from omlx_producer.client.workers import WorkerFigures, read_workers
from omlx_producer.connection import connect, redis_url, redis_variable
from omlx_producer.environment import DOTENV
from omlx_producer.errors import OmlxQueueError
from omlx_producer.program import INVALID, fail
from omlx_worker.connection import embedded_server
from omlx_worker.options import source_of
from omlx_worker.processes import lives
from omlx_worker.queue.embedded import running_url
from omlx_worker.settings import WorkerSettings

_Thing = TypeVar("_Thing")
Tell = Callable[[str], object]
Check = Callable[[], object]


class Gone(RuntimeError):
    """What another command has started has ended, and so has that command. One sentence."""


def worker_here(connection: Redis, alias: str) -> WorkerFigures | None:
    """A worker of this machine that can serve a model and is not told to end; None without one."""
    for worker in read_workers(connection, alias):
        able = worker.state != "draining" and not worker.fault
        if able and worker.host == socket.gethostname():
            key = Worker.redis_worker_namespace_prefix + worker.name
            if (pid := connection.hget(key, "pid")) and lives(int(pid)):
                return worker
    return None


@contextlib.contextmanager
def shared(
    place: Path,
    find: Callable[[], _Thing | None],
    start: Callable[[IO[bytes]], AbstractContextManager[tuple[_Thing, Check]]],
    tell: Tell,
) -> Iterator[tuple[_Thing, Check]]:
    """Use a thing of this machine, or start it.

    Whoever has started it waits at the end of the block until no other command uses it, unless an
    error ends the block.

    Yields the thing, and a check that raises if it has ended: Gone if another command had started
    it, else what the check of ``start`` raises. What no command has started may come back.

    Args:
        place: of the locks, a path without a suffix.
        start: gets a file that is locked while the thing runs. A process that inherits it keeps
            the lock until its own end.
        tell: told what is waited for.
    """
    with contextlib.ExitStack() as stack:
        with _lock_file(place, ".start") as starting:
            _wait_for(starting, lambda: tell("another command starts it"))
            users = stack.enter_context(_lock_file(place, ".users"))
            fcntl.flock(users, fcntl.LOCK_SH)
            runs = stack.enter_context(_lock_file(place, ".runs"))
            if (thing := find()) is not None:
                check: Check = partial(_require_locked, runs, place)
                if _is_free(runs):
                    check = nothing
            else:
                _wait_for(runs, lambda: tell("the one before ends"))
                thing, check = stack.enter_context(start(runs))

                def leave(kind: type[BaseException] | None, *_: object) -> None:
                    if kind is None or issubclass(kind, click.exceptions.Exit):
                        _wait_for(
                            users,
                            lambda: tell("another command uses it; Ctrl-C ends both"),
                        )

                stack.push(leave)
        yield thing, check


@contextlib.contextmanager
def server_here(settings: WorkerSettings, tell: Tell) -> Iterator[tuple[str, Check]]:
    """Find the Redis of a batch, or start one.

    It is the Redis that an option names. Without one it is that of ``REDIS_URL``, if a worker of
    this machine serves there. Otherwise it is the embedded server, started if it does not run. No
    other server is asked: any user of this machine could run it.

    Yields the URL, and a check that raises ServerError if a server that was started here has ended.

    Args:
        tell: told what is waited for.
    """
    if settings.redis_url:
        yield redis_url(settings.redis_url), nothing
        return

    @contextlib.contextmanager
    def start(_runs: IO[bytes]) -> Iterator[tuple[str, Check]]:
        with embedded_server(settings) as server:
            yield server.url, server.require_running

    with shared(
        settings.redis_dir / "server",
        lambda: _find_server(settings.redis_dir, settings.alias),
        start,
        lambda waits: tell(f"Redis: {waits}"),
    ) as server:
        yield server


def nothing() -> None:
    """The check of a server or worker that this command does not rely on to stay."""


def _find_server(folder: Path, alias: str) -> str | None:
    """The URL of the Redis that a variable names, if it answers and has a worker of this machine
    for the model; else of the embedded server that keeps its data in a folder. None if none does.
    """
    if redis_variable(DOTENV):
        named = redis_url(env_file=DOTENV)
        with (
            contextlib.suppress(RedisError, OmlxQueueError),
            connect(named, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0)) as connection,
        ):
            if worker_here(connection, alias):
                return named
    return running_url(folder)


def _lock_file(place: Path, suffix: str) -> IO[bytes]:
    try:
        place.parent.mkdir(0o700, parents=True, exist_ok=True)
        return place.with_name(place.name + suffix).open("ab")
    except OSError as error:
        fail(
            INVALID,
            f"{source_of('redis_dir')} {place.parent}: {error.strerror}; name another folder",
        )


def _is_free(file: IO[bytes]) -> bool:
    """Whether no process has an exclusive lock of a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def _require_locked(file: IO[bytes], place: Path) -> None:
    if _is_free(file):
        what = place.name.partition("-")[0]
        raise Gone(f"the {what} of another command has ended")


def _wait_for(file: IO[bytes], busy: Callable[[], object]) -> None:
    """Wait until no other process has a lock of a file, then hold it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        busy()
        fcntl.flock(file, fcntl.LOCK_EX)
