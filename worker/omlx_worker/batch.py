"""``omlx-worker batch``: a file, and all that it needs of this machine, in one command."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click

from omlx_producer.commands.file_run import FIRST, FileRun, file_options
from omlx_producer.commands.session import open_producer, with_command
from omlx_producer.producer import Producer
from omlx_producer.program import INVALID, JOB_ENDED_BADLY, UNREACHABLE, fail, say
from omlx_worker import waiting
from omlx_worker.at_home import Check, Gone, server_here, shared, worker_here
from omlx_worker.options import (
    ModelCommand,
    arguments_of,
    read_settings,
    require_mlx,
    settings_options,
    source_of,
    start_advice,
)
from omlx_worker.own_worker import OwnWorker, WorkerEnded
from omlx_worker.queue.embedded import ServerError
from omlx_worker.settings import WorkerSettings

# Options that a running worker has decided for itself, all of the worker, and where Redis is.
_DECIDED = (
    *("mtp_from", "vision_from", "drafter", "max_batch", "max_pixels", "mode"),
    *("mtp_depth", "fixed_shapes", "memory_limit"),
)
_WORKERS = ("model", "model_alias", *_DECIDED)
_REDIS = ("redis_url", "redis_dir")


@click.command(cls=ModelCommand, first=("model", "mtp_from", *FIRST))
@settings_options((*_WORKERS, *_REDIS))
@file_options
def batch(**values: Any) -> None:
    """Run a file with a model of this machine, or resume.

    INPUT and its options are those of omlx-submit run. A Redis server and a worker run as long as
    the file needs them; a worker of this machine that serves the model is used instead. All rows
    run on this model. Other options of the worker are OMLX_QUEUE_<OPTION> in the environment.

    Exit codes: 0 all rows are done, 1 some failed or the worker broke, 2 usage or no such model,
    3 Redis unreachable, 130 interrupted.
    """
    options = {name: values.pop(name) for name in _WORKERS}
    redis = {name: values.pop(name) for name in _REDIS}
    settings, _ = read_settings(options | redis)
    advice = start_advice(settings, options | redis)
    file = FileRun.of(values | {"model": settings.alias, "require_known_model": False})
    require_mlx()
    try:
        with server_here(settings, say) as (url, server_runs), open_producer(url) as producer:
            if not file.needs_worker(producer):
                return file.go(producer, advice)
            with _worker(settings, options, producer, file, url) as worker_runs:
                checks = worker_runs, server_runs
                file.go(producer, advice, lambda: [check() for check in checks])
    except WorkerEnded as error:
        go_on = "" if error.loading else _go_on(file)
        fail(error.code if error.code > 0 else JOB_ENDED_BADLY, f"{error}{go_on}")
    except Gone as error:
        fail(JOB_ENDED_BADLY, f"{error}{_go_on(file)}")
    except ServerError as error:
        fail(UNREACHABLE, f"{error}{_go_on(file)}")


def _go_on(file: FileRun) -> str:
    return f"; continue {with_command(stdin=file.input == '-')}"


@contextlib.contextmanager
def _worker(
    settings: WorkerSettings,
    options: Mapping[str, Any],
    producer: Producer,
    file: FileRun,
    url: str,
) -> Iterator[Check]:
    """A worker of this machine for the model, started here if there is none.

    Yields a check that raises WorkerEnded if a worker that was started here has ended, and Gone if
    it was started by another `batch`.
    """

    def find() -> str | None:
        if (found := worker_here(producer.connection, settings.alias)) is None:
            return None
        info = producer.models().get(settings.alias)
        if info is not None and not _same(info.model, settings.model):
            got = f"{source_of('model')}: got {shlex.quote(settings.model)}"
            fail(
                INVALID,
                f"{got}, but a worker of this machine serves {info.model} as {settings.alias}; "
                "give another --model-alias",
            )
        if file.progress != "none":
            others = arguments_of({name: options[name] for name in _DECIDED})
            given = ", ".join(each for each in others if each.startswith("--"))
            own = f", with its own {given}" if given else ""
            say(f"worker {found.name} of this machine serves {settings.alias}; using it{own}")
        return found.name

    def progress() -> str | None:
        if (found := worker_here(producer.connection, settings.alias)) is None:
            return ""
        return found.progress if found.is_loading else None

    @contextlib.contextmanager
    def start(runs: IO[bytes]) -> Iterator[tuple[None, Check]]:
        worker, at_once = OwnWorker(settings, arguments_of(options), url, runs), True
        try:
            with waiting.shown(file.progress, settings.alias) as show:
                worker.wait(progress, show)
            yield None, worker.require_running
            at_once = False
        except click.exceptions.Exit:
            at_once = False
            raise
        finally:
            worker.end(at_once=at_once)

    with shared(
        settings.redis_dir / f"worker-{quote(settings.alias, safe='')}",
        find,
        start,
        lambda waits: say(f"{settings.alias}: {waits}"),
    ) as (_, check):
        yield check


def _same(one: str, other: str) -> bool:
    """Whether two names of models mean the same folder, or are the same."""
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()
