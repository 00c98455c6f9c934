"""The command ``omlx-worker``.

Exit codes: 0 ended as asked, 1 the engine broke, 2 usage or no such model, 3 Redis unreachable,
128 + signal when stopped at once, by a second signal or, before the model is loaded, by the first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from omlx_producer.cli.common import (
    INTERRUPTED,
    SectionedCommand,
    check_variables,
    fail,
    json_option,
    say,
)
from omlx_producer.terminal import write
from omlx_worker.bench.cli import bench
from omlx_worker.logs import start_logging
from omlx_worker.options import USAGE, describe, read_settings, require_mlx, settings_options
from omlx_worker.settings import WorkerSettings

BROKEN, UNREACHABLE, STOPPED_AT_ONCE = 1, 3, 128

log = logging.getLogger("omlx_worker")


@click.group("omlx-worker", context_settings={"max_content_width": 110})
@click.version_option(package_name="omlx-queue")
def main() -> None:
    """Run generation jobs from a Redis queue on this machine."""
    check_variables()


@main.command(cls=SectionedCommand)
@settings_options()
def run(**options: Any) -> None:
    """Serve the jobs of one model until told to stop.

    Every option can also be set as OMLX_QUEUE_<OPTION> in the environment or in a file .env.
    """
    from omlx_producer.connection import redis_url
    from omlx_producer.environment import DOTENV
    from omlx_worker.queue.embedded import (
        USUAL_PORT,
        EmbeddedRedis,
        ServerError,
        preferred_port,
    )

    settings, given = read_settings(options)
    start_logging(settings.log_level, settings.log_format)
    require_mlx()
    with contextlib.ExitStack() as stack:
        url = redis_url(settings.redis_url, DOTENV)
        if settings.embedded_redis:
            if "redis_url" in given:
                fail(USAGE, "--embedded-redis runs its own server; leave --redis-url out")
            server = EmbeddedRedis(settings.redis_dir, port=preferred_port())
            try:
                url = stack.enter_context(server).url
            except ServerError as error:
                fail(UNREACHABLE, str(error))
            log.info("Redis is at %s", url)
            if server.port != USUAL_PORT:
                log.warning("port %d is taken: pass --redis-url %s to clients", USUAL_PORT, url)
        try:
            code = serve(settings, url)
        except KeyboardInterrupt:
            # Before the model is loaded; afterwards the worker handles signals.
            code = INTERRUPTED
    if code > STOPPED_AT_ONCE:
        # The engine may be in a step, which makes an orderly exit crash.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


@main.command()
@click.option(
    "--max-batch",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Rows in the batch at the same time.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=96,
    show_default=True,
    help="Generate at most this many tokens for a prompt.",
)
def demo(max_batch: int, max_tokens: int) -> None:
    """Run a server, the demo model, and a few prompts."""
    require_mlx()
    from omlx_producer.errors import OmlxQueueError
    from omlx_worker.queue.embedded import ServerError

    start_logging("warning")
    try:
        from omlx_worker.demo.run import run_demo

        run_demo(max_batch=max_batch, max_tokens=max_tokens)
    except ServerError as error:
        fail(UNREACHABLE, str(error))
    except ValidationError as error:
        fail(USAGE, describe(error))
    except OmlxQueueError as error:
        fail(BROKEN, str(error))
    except KeyboardInterrupt:
        logging.shutdown()
        os._exit(INTERRUPTED)


@main.command(cls=SectionedCommand)
@settings_options(
    {
        *("model", "mtp_from", "draft_model", "state_dir"),
        *("mode", "mtp_depth", "lookup", "memory_limit"),
    }
)
@json_option
def check(as_json: bool, **options: Any) -> None:
    """Say how this machine would serve a model, and serve nothing."""
    settings, _ = read_settings(options)
    start_logging("warning")
    require_mlx()
    from omlx_worker.build import ModelNotLoaded
    from omlx_worker.check import examine

    try:
        found = examine(settings)
    except ModelNotLoaded as error:
        fail(USAGE, str(error))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
    write(json.dumps(asdict(found)) + "\n" if as_json else str(found))


@main.command()
@click.argument("original", metavar="ORIGINAL")
@click.option("-o", "--output", metavar="FOLDER", type=Path, required=True, help="The new folder.")
@click.option(
    "--bits",
    type=click.Choice((4, 5, 6, 8)),
    help="Bits of quantised weights; else none is quantised.",
)
@click.option(
    "--group-size",
    type=click.Choice((32, 64, 128)),
    help="Weights that share a scale, with --bits.  [default: 64]",
)
@click.option(
    "--dtype",
    type=click.Choice(("bfloat16", "float16", "float32")),
    help="Precision of all other weights; else the original's.",
)
def convert(original: str, output: Path, **options: Any) -> None:
    """Convert a checkpoint to MLX, and keep its MTP head.

    ORIGINAL is a folder or a Hugging Face id, as its makers published it. Files that are in the
    cache of Hugging Face are not downloaded again.
    """
    require_mlx()
    from omlx_worker.engine.checkpoint import ModelError
    from omlx_worker.engine.conversion import Conversion, in_units

    if options["group_size"] and not options["bits"]:
        fail(USAGE, f"--group-size: got {options['group_size']}, but no --bits; give both")
    start_logging("warning")
    try:
        conversion = Conversion(original, output, **options)
        download = f"downloads {in_units(conversion.download)}, " if conversion.download else ""
        say(
            f"{download}writes about {in_units(conversion.size)} to {output}, and takes about "
            f"{in_units(conversion.memory)} of memory"
        )
        conversion.run()
    except ModelError as error:
        fail(USAGE, str(error))
    except KeyboardInterrupt:
        say(f"interrupted; {output} is not made")
        raise click.exceptions.Exit(INTERRUPTED) from None
    size = in_units(sum(path.stat().st_size for path in output.iterdir()))
    say(f"{output} has {size}, its MTP head included; serve it with:")
    write(f"omlx-worker run -m {shlex.quote(str(output))}\n")


main.add_command(bench)


def serve(settings: WorkerSettings, url: str) -> int:
    """Run a worker to its end; returns the exit code."""
    from redis.exceptions import RedisError
    from rq.logutils import colorizer

    from omlx_producer.errors import InvalidRequest, UnsuitableRedis
    from omlx_producer.outage import passes
    from omlx_producer.server import is_volatile, require_suitable
    from omlx_worker.build import ModelNotLoaded, connect, make_worker
    from omlx_worker.control.rq_record import NameTaken

    # The log escapes control characters, RQ's colours too.
    colorizer.notty = True
    try:
        connection = connect(url)
        connection.ping()
        require_suitable(connection, allow_eviction=settings.allow_eviction)
        if is_volatile(connection):
            log.warning(
                "Redis keeps nothing on disk, so its restart loses all jobs; turn that on with: "
                "redis-cli CONFIG SET appendonly yes"
            )
    except InvalidRequest as error:
        fail(USAGE, str(error).replace("connection:", "--redis-url:", 1))
    except UnsuitableRedis as error:
        fail(UNREACHABLE, str(error))
    except RedisError as error:
        fail(UNREACHABLE, _unreachable(url, error))
    log.info("omlx-queue %s loads %s", version("omlx-queue"), settings.model)
    try:
        # RQ asks the server for its own address.
        worker = make_worker(settings, connection)
        worker.require_free_name()
        worker.work(burst=settings.burst, logging_level=settings.log_level.upper())
    except (ModelNotLoaded, NameTaken) as error:
        fail(USAGE, str(error))
    except Exception as error:
        if passes(error):
            fail(UNREACHABLE, _unreachable(url, error))
        log.exception("the worker ends")
        fail(BROKEN, f"the worker cannot go on: {error}")
    finally:
        connection.close()
    return worker.exit_code


def _unreachable(url: str, error: Exception) -> str:
    from redis.exceptions import AuthenticationError, RedisError

    from omlx_producer.cli.session import redis_error, tls_problem
    from omlx_producer.connection import without_password

    if isinstance(error, AuthenticationError) or (
        isinstance(error, RedisError) and tls_problem(error, url)
    ):
        return redis_error(error, url)
    return (
        f"Redis at {without_password(url)} cannot be used ({error}); start a server there, "
        "name another with --redis-url, or pass --embedded-redis"
    )
