"""What an error says about the server, and what one call may do without."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    MovedError,
    ResponseError,
    TryAgainError,
)

from omlx_producer.outage import passes
from omlx_worker.control.extras import Extras
from omlx_worker.queue.unfit import unfit

WRONG_TYPE = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")


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


@pytest.mark.parametrize("error", [WRONG_TYPE, ResponseError("ERR x"), ConnectionError("gone")])
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
def test_a_cluster_half_of_which_is_there_is_no_outage_and_not_done_without(
    error: ResponseError,
) -> None:
    with pytest.raises(type(error)), Extras().attempt("the record"):
        raise error
    assert "Redis Cluster" in str(unfit(error))
    assert not passes(error)


def test_what_redis_refuses_is_done_without_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    extras = Extras()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with extras.attempt("the record"):
                raise WRONG_TYPE
    assert caplog.text.count("Redis refuses the record") == 1
