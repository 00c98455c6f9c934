"""What an error says about the server."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    MovedError,
    ResponseError,
    TryAgainError,
)

from omlx_producer.outage import passes
from omlx_worker.queue.unfit import unfit


@pytest.mark.parametrize(
    "message",
    [
        "User w has no permissions to run the 'zadd' command",
        "ACL failure in script: User w has no permissions to run the 'zadd' command",
        "ACL failure: User w has no permissions to run the 'zadd' command script: on @u:2.",
        "Command # 2 (ZADD a 1 User b) of pipeline caused error: "
        "User w has no permissions to run the 'zadd' command",
    ],
)
def test_a_missing_right_is_told_with_user_and_command(message: str) -> None:
    assert str(unfit(ResponseError(message))) == (
        "user w has no permissions to run the 'zadd' command; grant it with ACL SETUSER"
    )


@pytest.mark.parametrize("error", [ResponseError("ERR x"), ConnectionError("gone")])
def test_other_errors_say_nothing_about_the_server(error: Exception) -> None:
    assert unfit(error) is None


@pytest.mark.parametrize(
    "error",
    [
        MovedError("1 127.0.0.1:7000"),
        ClusterDownError("Hash slot not served"),
        TryAgainError("Multiple keys request during rehashing of slot"),
        ResponseError("Error running script: @user_script: 1: -CLUSTERDOWN The cluster is down"),
    ],
)
def test_a_cluster_half_of_which_is_there_is_no_outage(
    error: ResponseError,
) -> None:
    assert "Redis Cluster" in str(unfit(error))
    assert not passes(error)


def test_a_key_of_another_type_is_told_with_what_redis_says() -> None:
    error = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    assert str(unfit(error)) == (
        "one of the worker's keys is of another type (WRONGTYPE Operation against a key holding "
        "the wrong kind of value); delete or rename it"
    )
