"""What all commands of omlx-submit share: exit codes, the producer, options."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from omlx_producer.client import Producer
from omlx_producer.errors import InvalidRequest, OmlxQueueError, UnknownJob
from omlx_producer.settings import redis_url, without_password

JOB_ENDED_BADLY, INVALID, UNREACHABLE, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

REDIS_OPTION = "--redis-url"
redis_option = click.option(
    REDIS_OPTION,
    metavar="URL",
    help="Redis server; else OMLX_QUEUE_REDIS_URL, REDIS_URL, or redis://127.0.0.1:6379/0.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

output_option = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where results go; .jsonl, .csv or .parquet. Errors go to OUTPUT.errors.jsonl.",
)


def fail(exit_code: int, message: str) -> NoReturn:
    """End the command with one sentence on stderr."""
    click.echo(f"omlx-submit: {message}", err=True)
    raise click.exceptions.Exit(exit_code)


def file_trouble(error: OSError) -> str:
    """What is wrong with which file."""
    return f"{error.filename or 'the output'}: {error.strerror or error}"


@contextlib.contextmanager
def open_producer(given_url: str | None) -> Iterator[Producer]:
    """A producer whose troubles end the command with one sentence and its exit code."""
    url = redis_url(given_url)
    try:
        producer = Producer(url)
    except ValueError:
        # The reason may quote a part of the URL that is a password.
        fail(
            INVALID,
            "--redis-url: got something that is no URL of a Redis server; give one such as "
            "redis://127.0.0.1:6379/0",
        )
    with producer:
        try:
            yield producer
        except (InvalidRequest, UnknownJob) as error:
            fail(INVALID, str(error))
        except OmlxQueueError as error:
            fail(JOB_ENDED_BADLY, str(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            fail(JOB_ENDED_BADLY, file_trouble(error))
        except (ConnectionError, TimeoutError) as error:
            fail(
                UNREACHABLE,
                f"Redis at {without_password(url)} does not answer ({error}); start a server "
                "there, or name another with --redis-url or OMLX_QUEUE_REDIS_URL",
            )
        except RedisError as error:
            fail(UNREACHABLE, f"Redis at {without_password(url)} refuses: {error}")
