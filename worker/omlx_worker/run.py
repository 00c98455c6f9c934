"""``omlx-worker run``: serves the jobs of one model, or of several in turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import click

from omlx_producer.program import INTERRUPTED, INVALID, fail
from omlx_worker.logs import start_logging
from omlx_worker.models_option import ModelsCommand, read_models
from omlx_worker.options import (
    require,
    require_mlx,
    settings_options,
    source_of,
)
from omlx_worker.serving import end, work
from omlx_worker.settings import WorkerSettings

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
    end(code)


def serve(models: Sequence[WorkerSettings], url: str) -> int:
    """Run a worker of these models to its end; returns the exit code."""
    from omlx_worker.connection import reach
    from omlx_worker.model_process import ModelProcess
    from omlx_worker.model_worker import make_in_turn, make_worker

    settings = models[0]
    with reach(url, allow_eviction=settings.allow_eviction) as connection:
        named = ", ".join(model.model for model in models)
        log.info("omlx-queue %s loads %s", version("omlx-queue"), named)
        if len(models) == 1:
            return work(partial(make_worker, settings, None), settings, connection, url)
        make = partial(make_in_turn, models, partial(ModelProcess, url))
        return work(make, settings, connection, url)
