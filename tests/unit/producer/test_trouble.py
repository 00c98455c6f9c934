"""Trouble that passes is told from what never will."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from omlx_producer.trouble import passes


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Connection refused."),
        TimeoutError("Timeout reading from socket"),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but is unable to"),
        ResponseError("BUSY Redis is busy running a script"),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        ResponseError("Error running script: @user_script: 1: -OOM command not allowed"),
        ResponseError("Command # 2 (HSET k v) of pipeline caused error: MISCONF Redis is"),
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ReadOnlyError("You can't write against a read only replica."),
        BusyLoadingError("Redis is loading the dataset in memory"),
    ],
)
def test_trouble_that_passes_is_known(error: RedisError) -> None:
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        ResponseError("Command # 1 (HSET k BUSY BEE) of pipeline caused error: WRONGTYPE"),
        RedisError("the client is broken"),
        OSError("No space left on device"),
    ],
)
def test_what_does_not_pass_is_known_too_whatever_a_prompt_says(error: Exception) -> None:
    assert not passes(error)
