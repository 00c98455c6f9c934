"""``omlx-worker run``: serves the jobs of one model, or of several in turn."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import click

from omlx_producer.program import INTERRUPTED, INVALID, UNREACHABLE, fail
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.logs import start_logging
from omlx_worker.models_option import ModelsCommand, read_models
from omlx_worker.options import (
    by_source,
    require,
    require_mlx,
    settings_options,
    source_of,
)
from omlx_worker.settings import WorkerSettings

BROKEN, STOPPED_AT_ONCE = 1, 128

log = logging.getLogger("omlx_worker")


_FIRST = (
    *("model", "model_alias", "mtp_from", "max_batch", "redis_url", "embedded_redis"),
    *("memory_limit", "name", "log_file", "http"),
)


@click.command(cls=ModelsCommand, first=_FIRST)
@settings_options()
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Serve the jobs of a model until told to stop.

    With --model several times it serves the models in turn, one in memory at a time. Options of
    models and of decoding after a --model are for this model, those before the first for all.

    Every option can also be set as OMLX_QUEUE_<OPTION> in the environment or in a file .env.
    """
    from omlx_worker.connection import server_url

    models, given = read_models([options, *ModelsCommand.others(context)])
    settings = models[0]
    try:
        start_logging(settings.log_level, settings.log_format, settings.log_file)
    except OSError as error:
        fail(
            INVALID,
            f"{source_of('log_file')} {settings.log_file}: {error.strerror}; give another file",
        )
    require_mlx()
    if settings.metrics_port is not None:
        require("prometheus_client")
    if settings.http is not None:
        require("starlette", "uvicorn", "python_multipart", extra="worker,gateway")
    with server_url(settings, given) as url:
        try:
            code = serve(models, url)
        except KeyboardInterrupt:
            # Before the model is loaded; afterwards the worker handles signals.
            code = INTERRUPTED
    if code > STOPPED_AT_ONCE:
        # The engine may be in a step, which makes an orderly exit crash.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def serve(models: Sequence[WorkerSettings], url: str) -> int:
    """Run a worker to its end; returns the exit code."""
    from omlx_worker.build import make_worker
    from omlx_worker.connection import reach, unusable
    from omlx_worker.control.rq_record import NameTaken
    from omlx_worker.ports import serve_ports

    settings = models[0]
    with reach(url, allow_eviction=settings.allow_eviction) as connection:
        named = ", ".join(model.model for model in models)
        log.info("omlx-queue %s loads %s", version("omlx-queue"), named)
        try:
            # RQ asks the server for its own address.
            worker = make_worker(models, connection)
            worker.require_free_name()
            with serve_ports(settings, worker, url):
                worker.work(burst=settings.burst)
        except (ModelError, NameTaken) as error:
            fail(INVALID, by_source(str(error)))
        except Exception as error:
            if told := unusable(url, error):
                fail(UNREACHABLE, told)
            log.exception("the worker ends")
            fail(BROKEN, f"the worker cannot go on: {error}")
    return worker.exit_code or (UNREACHABLE if worker.unreachable else 0)
