"""A producer for one command: its errors end the program with a sentence and an exit code."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import click
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    TimeoutError,
)

from omlx_producer.cli.common import INVALID, JOB_ENDED_BADLY, UNREACHABLE, fail, file_error
from omlx_producer.client import Producer
from omlx_producer.connection import INVALID_URL, redis_url, without_password
from omlx_producer.errors import (
    InvalidRequest,
    JobCancelled,
    JobFailed,
    OmlxQueueError,
    UnknownJob,
    one_line,
)

_ELSEWHERE = "name another with --redis-url or OMLX_QUEUE_REDIS_URL"
# The first that fits counts: an AuthenticationError is a ConnectionError too.
_REASONS: tuple[tuple[tuple[type[RedisError], ...], str], ...] = (
    (
        (AuthenticationError,),
        "refuses the user or password ({error}); give both in the URL, as in "
        "redis://user:password@host:6379/0",
    ),
    (
        (NoPermissionError,),
        "denies this user a right ({error}); grant it with ACL SETUSER, for all keys and channels "
        "that match rq:* and omlx:*",
    ),
    (
        (AskError, ClusterDownError, ClusterCrossSlotError),
        "is part of a Redis Cluster, which is not supported; " + _ELSEWHERE,
    ),
    ((InvalidResponse,), "is not a Redis server ({error}); " + _ELSEWHERE),
    (
        (ConnectionError, TimeoutError),
        "does not answer ({error}); start a server there, or " + _ELSEWHERE,
    ),
    ((RedisError,), "refuses: {error}"),
)


def redis_error(error: RedisError, url: str) -> str:
    """A sentence that names the server, its error and the remedy."""
    reason = next(text for classes, text in _REASONS if isinstance(error, classes))
    return f"Redis at {without_password(url)} {reason.format(error=one_line(str(error)))}"


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
        except InvalidRequest as error:
            fail(INVALID, _name_option(str(error)))
        except UnknownJob as error:
            fail(INVALID, str(error))
        except (JobFailed, JobCancelled) as error:
            ending = "failed" if isinstance(error, JobFailed) else "cancelled"
            fail(JOB_ENDED_BADLY, f"job {error.job_id} {ending}: {error}")
        except OmlxQueueError as error:
            fail(JOB_ENDED_BADLY, str(error))
        except BrokenPipeError:
            raise
        except OSError as error:
            fail(JOB_ENDED_BADLY, file_error(error))
        except RedisError as error:
            fail(UNREACHABLE, redis_error(error, url))


@contextlib.contextmanager
def goes_on(kind: str, name: str, given_url: str | None) -> Iterator[None]:
    """If watching a job or a batch ends before it does, say how to watch it again."""
    try:
        yield
    except AuthenticationError:
        raise
    except (KeyboardInterrupt, ConnectionError, TimeoutError) as reason:
        where = f" --redis-url {without_password(given_url)}" if given_url else ""
        begins = f"\nthe {kind} goes on; " if isinstance(reason, KeyboardInterrupt) else ""
        click.echo(f"{begins}watch it again with: omlx-submit watch {name}{where}", err=True)
        raise


def _name_option(message: str) -> str:
    """The message of an `InvalidRequest` with the command's option in place of the field."""
    message = message.replace(" (require_known_model=False)", "")
    # What an option holds is a field's part here, or the field of a part.
    own = message.removeprefix("structured_outputs.")
    own = own.replace("response_format.json_schema.schema.", "response_format: ", 1)
    field = re.match(r"\w*", own)[0]  # type: ignore[index]
    for param in click.get_current_context().command.params:
        if param.name == "prompt" and field in ("prompt", "messages"):
            return re.sub(r"^(prompt|messages):", "PROMPT:", own)
        if param.name == field and isinstance(param, click.Option):
            option = max(param.opts, key=len)
            # The key of a repeatable ID=VALUE follows its option.
            rest = re.sub(r"^\.'([^']+)':", r" \1:", own.removeprefix(field))
            return (option + rest).replace("give logprobs: true too", "give --logprobs too")
    return message
