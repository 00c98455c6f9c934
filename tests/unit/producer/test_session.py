"""Errors of a command: one sentence that names the cause and the remedy."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner, Result
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)

from omlx_producer.commands.options import model_option, sampling_options
from omlx_producer.commands.session import open_producer
from omlx_producer.errors import InvalidRequest

URL = "redis://me:secret@127.0.0.1:1/0"


def ended(error: Exception) -> Result:
    """The end of a command that raises."""

    @click.command()
    @model_option("A model.")
    @sampling_options
    def command(**_: object) -> None:
        with open_producer(URL):
            raise error

    return CliRunner().invoke(command, prog_name="omlx-submit")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AuthenticationError("WRONGPASS invalid"), "refuses the user or password (WRONGPASS"),
        (
            AuthenticationError("HELLO must be called with the client already authenticated, or"),
            "asks for a password; give it in the URL, as in redis://:PASSWORD@host:6379/0\n",
        ),
        (
            ResponseError("unknown command 'HELLO', with args beginning with: '3'"),
            "is too old for jobs; upgrade it to Redis 7.2 or newer, or Valkey, or",
        ),
        (ResponseError("unknown command 'EVALSHA'"), "lacks a command that jobs need (unknown"),
        (ResponseError("DB index is out of range"), "has no database of this number; end the"),
        (
            ResponseError("Command # 1 (HSET k DB index) of pipeline caused error: NOPROTO no"),
            "does not speak the protocol that is asked for; add ?protocol=2 to the URL\n",
        ),
        (BusyLoadingError("Redis is loading"), "is still loading its data; try again\n"),
        (
            NoPermissionError("User a has no permissions to run the 'xadd' command"),
            "denies this user a right (User a has no permissions to run the 'xadd' command); "
            "grant it with ACL SETUSER",
        ),
        (MovedError("866 10.0.0.2:6379"), "is part of a Redis Cluster, which is not supported"),
        (ClusterDownError("Hash slot not served"), "is part of a Redis Cluster, which is not"),
        (InvalidResponse('got "H" as reply'), 'is not a Redis server (got "H" as reply); name'),
        (ConnectionError("refused"), "does not answer (refused); start a server there, or name"),
        (ResponseError("WRONGTYPE\nOperation"), "refuses: WRONGTYPE Operation"),
        (
            ResponseError("Command # 1 (HSET k unknown command) of pipeline caused error: WRONG"),
            "refuses: WRONG\n",
        ),
    ],
)
def test_an_error_of_redis_exits_with_3_and_its_remedy(error: RedisError, said: str) -> None:
    done = ended(error)
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"omlx-submit: Redis at redis://127.0.0.1:1/0 {said}")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("temperature", "--temperature"),
        ("max_completion_tokens", "--max-completion-tokens"),
        ("stop[1]", "--stop[1]"),
        ("model", "--model"),
        ("structured_outputs.choice[0]", "--choice[0]"),
        ("response_format.json_schema.schema.type", "--schema: type"),
        ("logit_bias.'5'", "--logit-bias 5"),
        ("prompt", "prompt"),
        ("top_logprobs", "--top-logprobs"),
        ("'x'", "'x'"),
    ],
)
def test_an_invalid_request_names_the_option(field: str, said: str) -> None:
    done = ended(InvalidRequest(field, "got 5", "give less"))
    assert (done.exit_code, done.stderr) == (2, f"omlx-submit: {said}: got 5; give less\n")


def test_what_is_no_field_is_told_as_it_is() -> None:
    assert ended(InvalidRequest(None, "n: is a file")).stderr == "omlx-submit: n: is a file\n"


@pytest.mark.parametrize(
    "url", ["http://host", "redis://host:x", "redis://a..b", "redis://h:99999"]
)
def test_a_url_that_is_none_exits_with_2(url: str) -> None:
    @click.command()
    def command() -> None:
        with open_producer(url) as producer:
            producer.connection.ping()

    done = CliRunner().invoke(command, prog_name="omlx-submit")
    assert (done.exit_code, done.exception.__class__) == (2, SystemExit)
    assert done.stderr.startswith("omlx-submit: --redis-url: ")
    assert "not the URL of a Redis server" in done.stderr
