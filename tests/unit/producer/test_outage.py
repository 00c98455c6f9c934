"""Trouble that passes is told from what never will."""

from __future__ import annotations

import logging

import pytest
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from omlx_producer.complaints import waiting_text
from omlx_producer.outage import Outage, passes


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Connection refused."),
        TimeoutError("Timeout reading from socket"),
        ResponseError("MISCONF Redis is configured to save RDB snapshots, but is unable to"),
        ResponseError("BUSY Redis is busy running a script"),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        NoScriptError("No matching script."),
        ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
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


def test_a_server_that_asks_for_a_password_is_said_to() -> None:
    error = AuthenticationError("HELLO must be called with the client already authenticated")
    assert waiting_text(error) == "Redis is unavailable (it asks for a password); waiting for it"


def test_what_waits_for_redis_does_not_tell_what_was_written() -> None:
    error = OutOfMemoryError("Command # 1 (HSET k secret) of pipeline caused error: OOM no room")
    assert waiting_text(error) == "Redis is unavailable (OOM no room); waiting for it"


def test_trouble_that_passes_is_waited_for() -> None:
    now = [0.0]
    outage = Outage(clock=lambda: now[0])
    assert outage.failed(ResponseError("BUSY Redis is busy running a script")) > 0
    now[0] = 3.0
    outage.failed(ConnectionError("refused"))
    assert outage.seconds == 3
    outage.answered()
    assert outage.seconds == 0


def test_what_does_not_pass_is_raised() -> None:
    error = ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        Outage().failed(error)


def test_pauses_double_up_to_a_bound_and_begin_again() -> None:
    outage = Outage(first=0.1, longest=1.0)
    lost = ConnectionError("away")
    for longest in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert longest / 2 <= outage.failed(lost) <= longest
    outage.answered()
    assert outage.failed(lost) <= 0.1


def test_two_outages_have_different_pauses() -> None:
    outages = [Outage(), Outage()]
    pauses = [[outage.failed(ConnectionError("away")) for _ in range(12)] for outage in outages]
    assert pauses[0] != pauses[1]


def test_an_outage_of_hours_has_a_pause_like_any_other() -> None:
    outage = Outage(longest=2.0)
    assert max(outage.failed(ConnectionError("away")) for _ in range(3000)) <= 2.0


def test_a_log_tells_the_beginning_a_reminder_and_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, gone = [0.0], ConnectionError("refused")
    outage = Outage(clock=lambda: now[0], log=logging.getLogger("outage"))
    with caplog.at_level(logging.INFO):
        outage.answered()
        for _ in range(45):
            outage.failed(gone)
            now[0] += 1.0
        outage.answered()
        outage.answered()

    unavailable = "Redis is unavailable (refused); waiting for it"
    assert caplog.messages == [unavailable, unavailable, "Redis is back after 45 s"]
    outage.failed(gone)
    assert caplog.messages[3:] == [unavailable]
