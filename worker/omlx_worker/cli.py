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
from typing import TYPE_CHECKING, Any, NoReturn

import click
from pydantic import ValidationError
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from omlx_producer.settings import without_password
from omlx_producer.trouble import passes
from omlx_worker.cli_bench import bench
from omlx_worker.depth import AutoPolicy, make_policy
from omlx_worker.embedded_redis import EmbeddedRedis, ServerError, data_folder, preferred_port
from omlx_worker.knowledge import Knowledge
from omlx_worker.memory import in_units
from omlx_worker.pacing import Pacing
from omlx_worker.settings import WorkerSettings

if TYPE_CHECKING:
    from omlx_worker.engine.interface import Engine

BROKEN, USAGE, UNREACHABLE, STOPPED_AT_ONCE = 1, 2, 3, 128
INTERRUPTED = STOPPED_AT_ONCE + signal.SIGINT


@click.group()
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
@click.option("--redis-url", help="Also OMLX_QUEUE_REDIS_URL or REDIS_URL.")
@click.option("--embedded-redis", is_flag=True, default=None, help="Start a server of its own.")
@click.option("--redis-dir", type=click.Path(path_type=Path), help="Data of the embedded server.")
@click.option("--max-batch", type=int, help="Rows in the batch at the same time.")
@click.option(
    "--mode",
    type=click.Choice(["auto", "hybrid", "mtp", "batched"]),
    help="Draft where it pays, for a lone row, always, or never.",
)
@click.option("--mtp-depth", type=int, help="Drafts a step with an MTP head; 0 for none.")
@click.option(
    "--acceptance",
    type=click.Choice(["coupled", "ratio"]),
    help="How drafts of requests without a seed are judged.",
)
@click.option("--burst", is_flag=True, default=None, help="End when the queues are empty.")
@click.option("--name", help="The worker's name in RQ; by default a unique one.")
@click.option("--lease-seconds", type=float, help="How long a silent worker keeps its jobs.")
@click.option("--prefill-chunk", type=int, help="Prompt tokens read between two steps, at most.")
@click.option(
    "--patience", type=float, help="Seconds that a job may be passed over for better ones."
)
@click.option("--memory-limit", metavar="SIZE", help="For model and caches, as in 24GB.")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Keeps what was measured.")
@click.option("--drain-timeout", type=float, help="Seconds for running jobs after SIGTERM.")
@click.option("--redis-grace", type=float, help="Seconds that Redis may be in trouble.")
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
        _fail(USAGE, f"{field}: got {problem['input']!r}; {problem['msg']}")
    with contextlib.ExitStack() as stack:
        url = settings.redis_url
        if settings.embedded_redis:
            try:
                url = stack.enter_context(_embedded(settings, "redis_url" in given)).url
            except ServerError as error:
                _fail(UNREACHABLE, str(error))
            click.echo(f"Redis is at {url}", err=True)
        try:
            code = serve(settings, url)
        except KeyboardInterrupt:
            # Until the model is loaded; from then on signals are the worker's.
            code = INTERRUPTED
    if code > STOPPED_AT_ONCE:
        # The engine may be in the middle of a step, which an orderly exit would trip over.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


@main.command()
@click.option("--max-batch", type=click.IntRange(1, 64), default=8, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=96, show_default=True)
def demo(max_batch: int, max_tokens: int) -> None:
    """Show everything at once: a server, the demo model, prompts that arrive staggered."""
    from omlx_worker.demo import run_demo

    logging.getLogger().setLevel(logging.WARNING)
    try:
        run_demo(max_batch=max_batch, max_tokens=max_tokens)
    except ServerError as error:
        _fail(UNREACHABLE, str(error))


main.add_command(bench)


def serve(settings: WorkerSettings, url: str) -> int:
    """Run a worker to its end; returns the exit code."""
    from omlx_worker.rq_record import NameTaken
    from omlx_worker.rq_worker import GenerationWorker

    try:
        connection = connect(url)
        connection.ping()
    except ValueError:
        # The reason may quote a part of the URL that is a password.
        _fail(
            USAGE,
            "--redis-url: got something that is no URL of a Redis server; give one such as "
            "redis://127.0.0.1:6379/0",
        )
    except RedisError as error:
        _fail(UNREACHABLE, _unreachable(url, error))
    try:
        # RQ asks the server for its own address.
        worker = GenerationWorker(
            settings.alias,
            lambda: load_engine(settings),
            connection=connection,
            name=settings.name,
            make_pacing=lambda engine: make_pacing(settings, engine),
            lease_seconds=settings.lease_seconds,
            prefill_chunk=settings.prefill_chunk,
            patience=settings.patience,
            memory_limit=settings.memory_limit,
            mode=settings.mode,
            drain_timeout=settings.drain_timeout,
            redis_grace=settings.redis_grace,
            stream_ttl=settings.stream_ttl,
        )
        worker.work(burst=settings.burst)
    except (ModelNotLoaded, NameTaken) as error:
        _fail(USAGE, str(error))
    except Exception as error:
        if passes(error):
            _fail(UNREACHABLE, _unreachable(url, error))
        logging.getLogger("omlx_worker").exception("the worker ends")
        _fail(BROKEN, f"the worker can not go on: {error}")
    finally:
        connection.close()
    return worker.exit_code


def make_pacing(settings: WorkerSettings, engine: Engine) -> Pacing:
    """How the engine's steps draft in the mode that was asked for."""
    policy = make_policy(settings.mode, engine.max_depth)
    knowledge = None
    if isinstance(policy, AutoPolicy):
        knowledge = Knowledge(policy, settings.state_dir, engine.identity)
    return Pacing(policy, engine.max_depth, knowledge)


class ModelNotLoaded(Exception):
    """There is no such model, or it can not be loaded. The message is one sentence."""


def load_engine(settings: WorkerSettings) -> Engine:
    """Load the model. MLX is imported only here.

    Raises:
        ModelNotLoaded: if there is no such model, or it can not be loaded.
    """
    try:
        from omlx_worker.engine import loader
    except ImportError as error:
        raise ModelNotLoaded(
            f"{error.name or 'MLX'} is not installed; install omlx-queue with its extra: "
            "pip install 'omlx-queue[worker]'"
        ) from error
    try:
        engine = loader.load_engine(
            settings.model,
            max_rows=settings.max_batch,
            depth=settings.depth,
            varies=settings.mode in ("auto", "hybrid"),
            ratio=settings.acceptance == "ratio",
        )
    except loader.ModelError as error:
        raise ModelNotLoaded(str(error)) from error
    if settings.memory_limit is not None and engine.weight_bytes >= settings.memory_limit:
        raise ModelNotLoaded(
            f"--memory-limit: got {in_units(settings.memory_limit)}, but the model's weights alone "
            f"take {in_units(engine.weight_bytes)}; raise it, or take a smaller model"
        )
    return engine


def connect(url: str) -> Redis:
    """A client for a worker: it waits for no answer longer than a lease can bear."""
    return Redis.from_url(
        url,
        socket_timeout=10.0,
        socket_connect_timeout=5.0,
        socket_keepalive=True,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2),
    )


def _embedded(settings: WorkerSettings, url_given: bool) -> EmbeddedRedis:
    if url_given:
        _fail(USAGE, "--embedded-redis starts a server of its own; leave --redis-url out")
    return EmbeddedRedis(settings.redis_dir or data_folder(), port=preferred_port())


def _unreachable(url: str, error: Exception) -> str:
    return (
        f"Redis at {without_password(url)} can not be used ({error}); start a server there, "
        "name another with --redis-url, or pass --embedded-redis"
    )


def _fail(code: int, sentence: str) -> NoReturn:
    click.echo(f"omlx-worker: {sentence}", err=True)
    sys.exit(code)
