"""The command ``omlx-gateway``."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path

import click

from omlx_gateway.gateway import MAX_BODY_BYTES, MAX_QUEUED, Limits
from omlx_producer import connection
from omlx_producer.errors import OmlxQueueError

USAGE = 2


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65_535))
@click.option("--redis-url", help="Redis; else OMLX_QUEUE_REDIS_URL or REDIS_URL.")
@click.option(
    "--max-queued",
    default=MAX_QUEUED,
    show_default=True,
    type=click.IntRange(1),
    help="Jobs that may wait for a model; then 429.",
)
@click.option(
    "--max-body",
    default=MAX_BODY_BYTES,
    show_default=True,
    type=click.IntRange(1),
    help="Bytes of a request, at most.",
)
@click.option(
    "--files-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Uploaded files; several gateways share it.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    help="Serve metrics for Prometheus there; 0: any.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="The address to serve them at.",
)
@click.version_option(package_name="omlx-queue", prog_name="omlx-gateway")
def main(
    host: str,
    port: int,
    redis_url: str | None,
    max_queued: int,
    max_body: int,
    files_dir: Path | None,
    metrics_port: int | None,
    metrics_host: str,
) -> None:
    """Serve OpenAI's HTTP interface from the queue."""
    try:
        import uvicorn

        from omlx_gateway.app import create_app
        from omlx_gateway.metrics import MeasuredApp, serve_metrics
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"{error.name} is missing; install it with pip install 'omlx-queue[gateway]'"
        ) from None
    if not _is_loopback(host):
        raise click.UsageError(
            f"--host: got {host!r}, which other machines reach, and there are no keys; "
            "give 127.0.0.1, with a reverse proxy that checks who may ask"
        )
    try:
        url = connection.redis_url(redis_url)
        app = MeasuredApp(create_app(url, Limits(max_body, max_queued), files_dir))
    except OmlxQueueError as error:
        raise click.UsageError(str(error)) from None
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            try:
                served = stack.enter_context(serve_metrics(metrics_host, metrics_port, app, url))
            except OSError as error:
                raise click.UsageError(
                    f"--metrics-host {metrics_host} --metrics-port {metrics_port}: nothing can be "
                    f"served there ({error.strerror or error}); give another"
                ) from None
            click.echo(f"metrics are at http://{metrics_host}:{served}/metrics", err=True)
        uvicorn.run(
            app, host=host, port=port, log_level="info", access_log=False, server_header=False
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
