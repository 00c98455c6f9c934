"""A producer for one command: its errors end the program with a sentence and an exit code."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial

import click
import redis
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    RedisError,
    TimeoutError,
)

from omlx_producer.bulk.driver import Check
from omlx_producer.complaints import redis_error, settings_error
from omlx_producer.connection import read_settings, redis_url, without_password
from omlx_producer.environment import DOTENV, PREFIX
from omlx_producer.errors import (
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobTimeout,
    ModelNotFound,
    OmlxQueueError,
    UnknownJob,
    UnsuitableRedis,
)
from omlx_producer.figures import read_unannounced
from omlx_producer.producer import Producer
from omlx_producer.program import (
    INVALID,
    JOB_ENDED_BADLY,
    NOT_ENDED,
    UNREACHABLE,
    fail,
    file_error,
    option,
    param_name,
    program_name,
)
from omlx_producer.wire.end import STATES

REDIS_OPTION = "--redis-url"
redis_option = option(
    REDIS_OPTION,
    section="Redis",
    metavar="URL",
    help="Default: OMLX_QUEUE_REDIS_URL, REDIS_URL, or this machine.",
)
job_argument = click.argument("job_id")


@contextlib.contextmanager
def open_producer(given_url: str | None) -> Iterator[Producer]:
    """A producer. Its errors end the command with one sentence and an exit code."""
    try:
        settings = read_settings(DOTENV)
        url = redis_url(given_url, DOTENV)
        producer = Producer(url, allow_eviction=settings.omlx_queue_allow_eviction)
    except InvalidRequest as error:
        fail(INVALID, settings_error(error))
    with producer:
        try:
            yield producer
        except InvalidRequest as error:
            fail(INVALID, _with_option(error, producer.connection))
        except UnknownJob as error:
            fail(INVALID, str(error))
        except UnsuitableRedis as error:
            fail(UNREACHABLE, str(error))
        except (JobFailed, JobCancelled) as error:
            state = STATES[error.code]
            fail(state.exit, f"job {error.job_id} {state.status}: {error}")
        except JobTimeout as error:
            fail(NOT_ENDED, f"{error}; it goes on")
        except OmlxQueueError as error:
            fail(JOB_ENDED_BADLY, str(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            fail(JOB_ENDED_BADLY, file_error(error))
        except RedisError as error:
            fail(UNREACHABLE, redis_error(error, url))


@contextlib.contextmanager
def goes_on(kind: str, name: str) -> Iterator[None]:
    """If watching a job or a batch ends before it does, say how to watch it again."""
    try:
        yield
    except AuthenticationError:
        raise
    except (KeyboardInterrupt, ConnectionError, TimeoutError) as reason:
        begins = f"\nthe {kind} goes on; " if isinstance(reason, KeyboardInterrupt) else ""
        click.echo(f"{begins}watch it again {with_command('watch', name)}", err=True)
        raise


@contextlib.contextmanager
def resumable(source: str, check: Check = None) -> Iterator[Callable[[], None]]:
    """If a run of this input ends early, say how to continue, after the reason.

    Yields the check of its `Driver`, which has begun once that is called.

    Args:
        check: what else is to be called then.
    """
    begun = False

    def turn() -> None:
        nonlocal begun
        begun = True
        if check:
            check()

    try:
        yield turn
    except (KeyboardInterrupt, RedisError, OSError) as error:
        if begun:
            advice = f"stopped; continue {with_command(stdin=source == '-')}"
            click.get_current_context().call_on_close(partial(click.echo, advice, err=True))
        if isinstance(error, OSError):
            fail(JOB_ENDED_BADLY, file_error(error))
        raise


def with_command(*words: str, stdin: bool = False) -> str:
    """``with: omlx-submit WORDS`` on the same Redis; without words, the running command, whose
    program may be another.

    A URL that may hold a password is not shown. The variable is named that takes its place.

    Args:
        stdin: whether the command reads the same input from there.
    """
    context = click.get_current_context(silent=True)
    url = context.params.get("redis_url") if context else None
    secret = url is not None and without_password(url) != url
    needs = ["the same input on stdin"] if stdin else []
    if secret:
        needs.append(f"{PREFIX}REDIS_URL set to the same URL")
    command, previous = list[str](), ""
    for word in words or sys.argv[1:]:
        if not (secret and REDIS_OPTION in (previous, word.partition("=")[0])):
            command.append(word)
        previous = word
    if words and url is not None and not secret:
        command += [REDIS_OPTION, url]
    program = "omlx-submit" if words else program_name()
    return f"with {' and '.join(needs)}".rstrip() + f": {program} {shlex.join(command)}"


def _with_option(error: InvalidRequest, connection: redis.Redis) -> str:
    """The sentence of an error, with the command's option in place of the field.

    Of a model that workers load and have not announced, it says that instead.
    """
    context = click.get_current_context()
    first = "prompt" if context.params.get("system") is None else "system"
    texts = {"messages": "prompt", "messages[0].content": first, "messages[1].content": "prompt"}
    field = texts.get(error.field or "", error.field or "")
    # An option may stand for a part of a field: --regex for structured_outputs.regex.
    field = field.removeprefix("structured_outputs.")
    field = field.replace("response_format.json_schema.schema.", "response_format: ", 1)
    told = error.told(error.field)
    for param in context.command.params:
        rest = field.removeprefix(param.name or "")
        if rest == field or rest[:1].isidentifier():
            continue
        # The key of a repeatable ID=VALUE follows its option.
        told = error.told(param_name(param) + re.sub(r"^\.'([^']+)'$", r" \1", rest))
    if isinstance(error, ModelNotFound) or error.field == "model":
        with contextlib.suppress(RedisError):
            loading = read_unannounced(connection, context.params.get("model"))
            told = f"{loading}; try again in a moment" if loading else told
    anyway = isinstance(error, ModelNotFound) and error.anyway and "queue_anyway" in context.params
    return f"{told}, or pass --queue-anyway" if anyway else told
