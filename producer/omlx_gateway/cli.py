"""The command ``omlx-gateway``."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from redis.exceptions import RedisError

from omlx_gateway.keys import KeyFile, KeyFileError, add_key, read_keys
from omlx_gateway.limits import MAX_BODY_BYTES, Limits
from omlx_producer import connection
from omlx_producer.complaints import redis_error, settings_error
from omlx_producer.errors import InvalidRequest, OmlxQueueError, UnsuitableRedis
from omlx_producer.program import INVALID, UNREACHABLE, Program, fail, option, port_error, say
from omlx_producer.wire import PRIORITIES

USAGE = 2

_file_option = option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    default="api-keys.jsonl",
    show_default=True,
    help="The file of keys.",
)


@click.group(cls=Program, invoke_without_command=True)
@option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@option("--port", default=8000, show_default=True, type=click.IntRange(0, 65_535))
@option("--redis-url", help="Redis; else OMLX_QUEUE_REDIS_URL or REDIS_URL.")
@option(
    "--api-keys",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Serve only who has a key of this file.",
)
@option(
    "--allow-host",
    "hosts",
    metavar="NAME",
    multiple=True,
    help="Without keys, answer at this name, too.",
)
@option(
    "--max-body",
    default=MAX_BODY_BYTES,
    show_default=True,
    type=click.IntRange(1),
    help="Bytes of a request, at most.",
)
@option(
    "--metrics-port",
    type=click.IntRange(0, 65_535),
    help="Serve metrics for Prometheus there; 0: any.",
)
@option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="The address to serve them at.",
)
@click.version_option(package_name="omlx-queue", prog_name="omlx-gateway")
@click.pass_context
def main(
    context: click.Context,
    host: str,
    port: int,
    redis_url: str | None,
    api_keys: Path | None,
    hosts: tuple[str, ...],
    max_body: int,
    metrics_port: int | None,
    metrics_host: str,
) -> None:
    """Serve OpenAI's HTTP interface from the queue."""
    if context.invoked_subcommand is not None:
        return
    try:
        from omlx_gateway.app import create_app
        from omlx_gateway.metrics import MeasuredApp, serve_metrics
        from omlx_gateway.server import allow_open_files, listen, make_server
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"{error.name} is missing; install it with pip install 'omlx-queue[gateway]'"
        ) from None
    if api_keys is None and not _is_loopback(host):
        raise click.UsageError(
            f"--host: got {host!r}, which other machines reach, and there are no keys; "
            "give --api-keys FILE, or 127.0.0.1"
        )
    allow_open_files()
    try:
        url = connection.redis_url(redis_url)
        keys = KeyFile(api_keys) if api_keys else None
        app = MeasuredApp(create_app(url, Limits(max_body), keys, (_in_url(host), *hosts)))
    except InvalidRequest as error:
        raise click.UsageError(settings_error(error, env_file=None)) from None
    except KeyFileError as error:
        raise click.UsageError(f"--api-keys: {error}") from None
    _reach(url)
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            try:
                served = stack.enter_context(serve_metrics(metrics_host, metrics_port, app, url))
            except OmlxQueueError as error:
                fail(INVALID, str(error))
            click.echo(f"metrics are at http://{metrics_host}:{served}/metrics", err=True)
        try:
            sockets = [stack.enter_context(each) for each in listen(host, port)]
        except OSError as error:
            fail(INVALID, port_error(f"--host {host} --port {port}", error))
        page = f"http://{_in_url(host)}:{sockets[0].getsockname()[1]}/"
        say(f"ready at {page}v1, with a page at {page}")
        with contextlib.suppress(KeyboardInterrupt):
            make_server(app).run(sockets)


@main.group()
def keys() -> None:
    """Make and list API keys."""


@keys.command()
@click.argument("name")
@option(
    "--level",
    type=click.Choice(PRIORITIES),
    default="high",
    show_default=True,
    help="The best priority of its requests.",
)
@option("--models", metavar="A,B", help="The models that it may use; else all.")
@option("--admin", is_flag=True, help="It may use the page and its buttons.")
@_file_option
def add(name: str, models: str | None, file: Path, **allowed: Any) -> None:
    """Make a key, and show it once."""
    names = None if models is None else tuple(each.strip() for each in models.split(","))
    try:
        key = add_key(file, name, models=names, **allowed)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        remedy = {
            "name": "NAME: got {!r}; give up to 64 letters, digits and . _ -",
            "models": "--models: got {!r}; give names of models with commas between them",
        }[str(problem["loc"][0])]
        raise click.UsageError(remedy.format(problem["input"])) from None
    except KeyFileError as error:
        raise click.UsageError(str(error)) from None
    click.echo(key)
    click.echo(f"{file} has its hash alone; keep the key, which cannot be shown again", err=True)


@keys.command("list")
@_file_option
def list_keys(file: Path) -> None:
    """List the keys of a file by name."""
    try:
        for key in read_keys(file):
            models = "all models" if key.models is None else ", ".join(key.models)
            admin = "  admin" if key.admin else ""
            click.echo(f"{key.name}  {key.level}  {models}{admin}")
    except KeyFileError as error:
        raise click.UsageError(str(error)) from None


def _reach(url: str) -> None:
    """Look whether jobs can be left with a server, or end the program with a sentence."""
    try:
        with connection.connect(url, socket_timeout=5) as client:
            client.ping()
            connection.require_suitable(client, allow_eviction=None)
    except UnsuitableRedis as error:
        fail(UNREACHABLE, str(error))
    except RedisError as error:
        fail(UNREACHABLE, redis_error(error, url))


def _in_url(host: str) -> str:
    """An address as the header ``Host`` has it."""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
