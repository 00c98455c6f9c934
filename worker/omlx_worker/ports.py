"""What a worker serves at ports: metrics, and with ``--http`` a gateway.

The gateway is a process of its own, which ends with the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omlx_producer.environment import PREFIX
from omlx_producer.errors import OmlxQueueError
from omlx_producer.program import INVALID, fail, port_error
from omlx_worker.options import by_source, source_of
from omlx_worker.processes import Child, how_ended, python_command
from omlx_worker.settings import HTTP_HOST, WorkerSettings

if TYPE_CHECKING:
    from omlx_worker.control.in_turn import ModelsInTurn
    from omlx_worker.control.worker import GenerationWorker

ANSWER_SECONDS = 8
"""For answers that are still being written when the worker ends: more than a gateway takes."""

log = logging.getLogger("omlx_worker")


@contextlib.contextmanager
def serve_ports(
    settings: WorkerSettings, worker: GenerationWorker | ModelsInTurn, url: str
) -> Iterator[None]:
    """Serve what the settings name until the block ends.

    Args:
        url: of Redis.
    """
    with contextlib.ExitStack() as stack:
        shared = None
        if settings.metrics_port is not None:
            from omlx_worker.metrics import serve_metrics

            if settings.http is not None:
                shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="omlx-metrics-"))
            where = settings.metrics_host, settings.metrics_port
            metrics = serve_metrics(*where, worker, url, shared)
            try:
                stack.enter_context(metrics)
            except OmlxQueueError as error:
                fail(INVALID, by_source(str(error)))
        if settings.http is not None:
            stack.enter_context(serve_http(settings.http, settings, url, shared))
        yield


@contextlib.contextmanager
def serve_http(
    port: int, settings: WorkerSettings, url: str, metrics: str | None = None
) -> Iterator[Child]:
    """Run a gateway until the block ends; yields its process.

    Ends the program with a sentence if nothing can be served there.

    Args:
        url: of Redis.
        metrics: a folder that it shares its metrics in.
    """
    try:
        socket.create_server((HTTP_HOST, port)).close()
    except OSError as error:
        fail(INVALID, port_error(f"{source_of('http')} {port}", error))
    # The URL may hold a password, which other users would see among the arguments.
    environment = {**os.environ, f"{PREFIX}REDIS_URL": url}
    if settings.allow_eviction:
        environment[f"{PREFIX}ALLOW_EVICTION"] = "true"
    if metrics is not None:
        # prometheus_client's own variable.
        environment["PROMETHEUS_MULTIPROC_DIR"] = metrics
    # Ctrl-C in the terminal is for the worker: streams go on while it drains.
    gateway = Child(
        python_command(
            "omlx_gateway.cli", "omlx-gateway", "--host", HTTP_HOST, "--port", str(port)
        ),
        seconds=ANSWER_SECONDS,
        env=environment,
    )
    ending = threading.Event()
    watch = threading.Thread(target=_tell_of_end, args=(gateway, ending), daemon=True)
    watch.start()
    try:
        yield gateway
    finally:
        ending.set()
        gateway.end(ANSWER_SECONDS)
        watch.join()


def _tell_of_end(gateway: Child, ending: threading.Event) -> None:
    """Wait for the gateway's end, and log one that the worker did not ask for."""
    code = gateway.wait()
    if not ending.is_set():
        log.error(
            "the gateway %s: this worker serves no HTTP until it is restarted", how_ended(code)
        )
