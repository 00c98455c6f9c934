"""Shared by the commands: exit codes, errors, the producer, options."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from omlx_producer.client import Producer
from omlx_producer.connection import INVALID_URL, redis_url, without_password
from omlx_producer.errors import InvalidRequest, OmlxQueueError, UnknownJob

JOB_ENDED_BADLY, INVALID, UNREACHABLE, INTERRUPTED, BROKEN_PIPE = 1, 2, 3, 130, 141

REDIS_OPTION = "--redis-url"
redis_option = click.option(
    REDIS_OPTION,
    metavar="URL",
    help="Default: OMLX_QUEUE_REDIS_URL, REDIS_URL, or this machine.",
)
job_argument = click.argument("job_id")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

output_option = click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Results (.jsonl, .csv, .parquet); errors beside them.",
)
with_body_option = click.option(
    "--with-body", is_flag=True, help="Add whole responses to a CSV or Parquet."
)


def fail(exit_code: int, message: str) -> NoReturn:
    """End the program with one sentence on stderr, after the program's name."""
    context = click.get_current_context(silent=True)
    program = context.find_root().info_name if context else Path(sys.argv[0]).name
    click.echo(f"{program}: {message}", err=True)
    sys.exit(exit_code)


def file_error(error: OSError) -> str:
    """A sentence that names the file and its error."""
    return f"{error.filename or 'the output'}: {error.strerror or error}"


@contextlib.contextmanager
def open_producer(given_url: str | None) -> Iterator[Producer]:
    """A producer. Its errors end the command with one sentence and an exit code."""
    url = redis_url(given_url)
    try:
        producer = Producer(url)
    except ValueError:
        fail(INVALID, INVALID_URL)
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
            fail(JOB_ENDED_BADLY, file_error(error))
        except (ConnectionError, TimeoutError) as error:
            fail(
                UNREACHABLE,
                f"Redis at {without_password(url)} does not answer ({error}); start a server "
                "there, or name another with --redis-url or OMLX_QUEUE_REDIS_URL",
            )
        except RedisError as error:
            fail(UNREACHABLE, f"Redis at {without_password(url)} refuses: {error}")
