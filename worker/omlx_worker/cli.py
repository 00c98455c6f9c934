"""The command ``omlx-worker``.

Exit codes: 0 ended as asked, 1 the engine broke, 2 usage or no such model, 3 Redis unreachable,
128 + signal when stopped at once, by a second signal or, before the model is loaded, by the first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from redis.exceptions import RedisError

from omlx_producer.cli.common import fail
from omlx_producer.connection import INVALID_URL, without_password
from omlx_producer.errors import OmlxQueueError
from omlx_producer.outage import passes
from omlx_worker.bench.cli import bench
from omlx_worker.queue.embedded import EmbeddedRedis, ServerError, preferred_port
from omlx_worker.settings import WorkerSettings

BROKEN, USAGE, UNREACHABLE, STOPPED_AT_ONCE = 1, 2, 3, 128
INTERRUPTED = STOPPED_AT_ONCE + signal.SIGINT


@click.group("omlx-worker")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def main(verbose: bool) -> None:
    """Run generation jobs from a Redis queue on this machine."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )


@main.command()
@click.option("--model", help="demo, a folder, or a Hugging Face id.")
@click.option("--model-alias", help="The name in requests and queues.")
@click.option("--redis-url", help="Default: OMLX_QUEUE_REDIS_URL or REDIS_URL.")
@click.option("--embedded-redis", is_flag=True, default=None, help="Run a Redis server as a child.")
@click.option(
    "--redis-dir", type=click.Path(path_type=Path), help="Data folder of the embedded server."
)
@click.option("--max-batch", type=int, help="Rows in the batch at the same time.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "hybrid", "mtp", "batched"]),
    help="Draft if faster, for a single row, always, never.",
)
@click.option("--mtp-depth", type=int, help="Drafts per step with an MTP head; 0 for none.")
@click.option(
    "--acceptance",
    type=click.Choice(["coupled", "ratio"]),
    help="The rule for drafts of requests without a seed.",
)
@click.option("--burst", is_flag=True, default=None, help="End when the queues are empty.")
@click.option("--name", help="The worker's name in RQ; by default a unique one.")
@click.option("--lease-seconds", type=float, help="How long a silent worker keeps its jobs.")
@click.option("--prefill-chunk", type=int, help="Prompt tokens read between two steps, at most.")
@click.option("--patience", type=float, help="Seconds before a job of a worse queue gets its turn.")
@click.option("--memory-limit", metavar="SIZE", help="For model and caches, as in 24GB.")
@click.option(
    "--calibration/--no-calibration",
    default=None,
    help="Measure step times while idle, for mode auto.",
)
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Folder of measurements for the next start.",
)
@click.option("--drain-timeout", type=float, help="Seconds for running jobs after SIGTERM.")
@click.option("--redis-grace", type=float, help="Seconds that Redis may be away.")
def run(**options: Any) -> None:
    """Serve the jobs of one model until told to stop.

    Every option can also be set as OMLX_QUEUE_<OPTION> in the environment.
    """
    given = {key: value for key, value in options.items() if value is not None}
    try:
        settings = WorkerSettings(**given)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = str(problem["loc"][0]) if problem["loc"] else "settings"
        fail(USAGE, f"{field}: got {problem['input']!r}; {problem['msg']}")
    with contextlib.ExitStack() as stack:
        url = settings.redis_url
        if settings.embedded_redis:
            if "redis_url" in given:
                fail(USAGE, "--embedded-redis runs its own server; leave --redis-url out")
            server = EmbeddedRedis(settings.redis_dir, port=preferred_port())
            try:
                url = stack.enter_context(server).url
            except ServerError as error:
                fail(UNREACHABLE, str(error))
            click.echo(f"Redis is at {url}", err=True)
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
@click.option("--max-batch", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=96, show_default=True)
def demo(max_batch: int, max_tokens: int) -> None:
    """Run a server, the demo model, and a few prompts."""
    logging.getLogger().setLevel(logging.WARNING)
    try:
        from omlx_worker.demo.run import run_demo

        run_demo(max_batch=max_batch, max_tokens=max_tokens)
    except ServerError as error:
        fail(UNREACHABLE, str(error))
    except OmlxQueueError as error:
        fail(BROKEN, str(error))
    except KeyboardInterrupt:
        logging.shutdown()
        os._exit(INTERRUPTED)


main.add_command(bench)


def serve(settings: WorkerSettings, url: str) -> int:
    """Run a worker to its end; returns the exit code."""
    from omlx_worker.build import ModelNotLoaded, connect, make_worker
    from omlx_worker.control.rq_record import NameTaken

    try:
        connection = connect(url)
        connection.ping()
    except ValueError:
        fail(USAGE, INVALID_URL)
    except RedisError as error:
        fail(UNREACHABLE, _unreachable(url, error))
    try:
        # RQ asks the server for its own address.
        worker = make_worker(settings, connection)
        worker.work(burst=settings.burst)
    except (ModelNotLoaded, NameTaken) as error:
        fail(USAGE, str(error))
    except Exception as error:
        if passes(error):
            fail(UNREACHABLE, _unreachable(url, error))
        logging.getLogger("omlx_worker").exception("the worker ends")
        fail(BROKEN, f"the worker cannot go on: {error}")
    finally:
        connection.close()
    return worker.exit_code


def _unreachable(url: str, error: Exception) -> str:
    return (
        f"Redis at {without_password(url)} cannot be used ({error}); start a server there, "
        "name another with --redis-url, or pass --embedded-redis"
    )
