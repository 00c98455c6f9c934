"""Uploads that stand still: kept while the client lives, and told when they were not."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.connection import Connection

from omlx_producer import UnknownJob
from omlx_producer.bulk import batch as batch_module
from omlx_producer.bulk.batch import ALIVE_SECONDS, UPLOAD_SECONDS, Batch
from omlx_producer.bulk.row import BadRow, Row
from omlx_producer.connection import connect
from omlx_producer.wire.keys import BATCHES_KEY
from tests.helpers.bulk_rows import QUEUE, RUN, rows
from tests.helpers.workers import wait_for

BAD = BadRow(1, None, "unparsable", "line 1: not JSON", "0" * 24, False)


@pytest.mark.slow
def test_an_input_that_blocks_for_longer_than_the_expiry_is_uploaded_whole(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "UPLOAD_SECONDS", 1)
    batch = Batch.create(connection)

    def slow() -> Iterator[Row]:
        yield from rows(1250)
        time.sleep(2.5)
        yield from rows(10, start=1250)

    assert batch.upload(slow()) == 1260
    state = batch.read()
    assert (state.state, state.rows) == ("open", 1260)
    assert connection.llen(batch.waiting_key(QUEUE)) == 1260
    assert connection.ttl(batch.key) == connection.ttl(batch.waiting_key(QUEUE)) == -1


def test_rows_are_uploaded_though_their_expiry_is_renewed_while_each_is_packed(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, pack = Batch.create(connection), batch_module._packed

    def slowly(*args: Any) -> bytes:
        connection.expire(batch.key, UPLOAD_SECONDS)
        return pack(*args)

    monkeypatch.setattr(batch_module, "_packed", slowly)
    assert batch.upload(rows(5)) == 5


def test_an_upload_that_has_expired_is_told_and_leaves_nothing_for_ever(
    connection: redis.Redis,
) -> None:
    batch = Batch.create(connection)

    def expiring() -> Iterator[Row | BadRow]:
        yield from rows(1250)
        # As a machine finds it that slept for longer.
        connection.delete(batch.key, batch.waiting_key(QUEUE))
        yield BAD
        yield from rows(250, start=1250)

    with pytest.raises(UnknownJob, match=r"was deleted .* or .* has expired; run it again"):
        batch.upload(expiring())
    assert connection.zcard(BATCHES_KEY) == 0
    assert not list(connection.scan_iter("omlx:batch:*"))


def test_an_upload_that_slept_adds_nothing_to_the_one_that_has_its_place(
    connection: redis.Redis,
) -> None:
    batch = Batch.create(connection)

    def sleeping() -> Iterator[Row]:
        yield from rows(1250)
        assert not Batch(connection, batch.id).begin({}), "it is alive"
        # As when it has not renewed the batch for that long.
        connection.expire(batch.key, UPLOAD_SECONDS - ALIVE_SECONDS)
        assert Batch(connection, batch.id).begin({})
        yield from rows(1250, start=1250)

    with pytest.raises(UnknownJob, match="run it again"):
        batch.upload(sleeping())
    assert batch.read().rows == 0
    assert batch.upload(rows(5)) == 5
    waiting = connection.lrange(batch.waiting_key(QUEUE), 0, -1)
    assert sorted(int(row.split()[0]) for row in waiting) == [1, 2, 3, 4, 5]


def test_an_upload_that_slept_before_its_first_row_is_none_of_the_one_in_its_place(
    connection: redis.Redis,
) -> None:
    batch = Batch.of_run(connection, f"{RUN}89ab")
    slept = batch.begin({})
    connection.expire(batch.key, UPLOAD_SECONDS - ALIVE_SECONDS)
    begun = batch.begin({})
    batch.fail(slept, "[]")
    with pytest.raises(UnknownJob, match="run it again"):
        batch.upload(rows(5), slept)
    assert batch.upload(rows(5), begun) == 5
    assert connection.llen(batch.waiting_key(QUEUE)) == 5


def test_a_batch_is_made_though_the_answer_is_lost(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, cuts = Connection.send_packed_command, []

    def cut_first_script(self: Connection, command: Any, check_health: bool = True) -> None:
        send(self, command, check_health)
        if not cuts and any(b"EVALSHA" in part for part in command):
            assert self._sock.recv(1 << 16)
            cuts.append(self._sock.shutdown(socket.SHUT_RDWR))

    with connect(redis_url) as connection:
        # The server knows the script.
        Batch.create(connection)
        monkeypatch.setattr(Connection, "send_packed_command", cut_first_script)
        assert Batch.of_run(connection, f"{RUN}89ab").begin({})
        assert len(cuts) == 1


def test_an_upload_that_is_over_is_no_longer_renewed(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "UPLOAD_SECONDS", 1)
    batch = Batch.create(connection)
    with pytest.raises(KeyboardInterrupt):
        batch.upload(interrupted())
    wait_for(lambda: not connection.exists(batch.key, batch.waiting_key(QUEUE)), what="the expiry")


def test_an_upload_whose_answer_is_lost_counts_each_row_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, cuts = Connection.send_packed_command, []

    def cut_first_exec(self: Connection, command: Any, check_health: bool = True) -> None:
        send(self, command, check_health)
        if not cuts and any(b"EXEC" in part for part in command):
            assert self._sock.recv(1 << 16)
            cuts.append(self._sock.shutdown(socket.SHUT_RDWR))

    with connect(redis_url) as connection:
        batch = Batch.create(connection)
        monkeypatch.setattr(Connection, "send_packed_command", cut_first_exec)
        assert batch.upload([BAD, *rows(250)]) == 251
        assert len(cuts) == 1
        state = batch.read()
        assert (state.state, state.rows, state.failures) == ("open", 251, {"unparsable": 1})
        waiting = connection.lrange(batch.waiting_key(QUEUE), 0, -1)
        assert sorted(int(row.split()[0]) for row in waiting) == list(range(2, 252))


def interrupted() -> Iterator[Row]:
    yield from rows(1250)
    raise KeyboardInterrupt
