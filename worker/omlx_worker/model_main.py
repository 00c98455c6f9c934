"""The program of a `ModelProcess`. It logs to its parent."""

from __future__ import annotations

import os
from functools import partial

import click

from omlx_worker.connection import connect
from omlx_worker.logs import start_logging
from omlx_worker.model_process import VARIABLE, Order
from omlx_worker.options import require_mlx
from omlx_worker.serving import end, work
from omlx_worker.settings import WorkerSettings


@click.command()
def main() -> None:
    """Serve the model of an `Order` until told to end."""
    order = Order.model_validate_json(os.environ.pop(VARIABLE))
    settings = WorkerSettings(**order.settings)
    start_logging(settings.log_level, "json")
    require_mlx()
    from omlx_worker.model_worker import make_worker

    with connect(order.url) as connection:
        code = work(partial(make_worker, settings, order.turn), settings, connection, order.url)
    end(code)
