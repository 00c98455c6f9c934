"""Uploads that stand still: kept while the client lives, and told when they were not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from omlx_producer import UnknownJob
from omlx_producer.bulk import batch as batch_module
from omlx_producer.bulk.batch import BATCHES_KEY, Batch
from omlx_producer.bulk.batch_feeder import Feeder
from omlx_producer.bulk.row import BadRow, Row
from tests.helpers.workers import wait_for
from tests.integration.producer.bulk.test_feed import rows

BAD = BadRow(1, None, "unparsable", "line 1: not JSON", "0" * 24, False)


@pytest.mark.slow
def test_an_input_that_blocks_for_longer_than_the_expiry_is_uploaded_whole(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "UPLOAD_SECONDS", 1)
    batch = Batch.create(connection)

    def slow() -> Iterator[Row]:
        yield from rows(250)
        time.sleep(2.5)
        yield from rows(10, start=250)

    assert batch.upload(slow()) == 260
    state = batch.read()
    assert (state.state, state.rows) == ("open", 260)
    assert len(list(batch.unfinished())) == 260
    assert connection.ttl(batch.key) == connection.ttl(batch.rows_key) == -1


def test_an_upload_that_has_expired_is_told_and_leaves_nothing_for_ever(
    connection: redis.Redis,
) -> None:
    batch = Batch.create(connection)

    def expiring() -> Iterator[Row | BadRow]:
        yield from rows(250)
        # As a machine finds it that slept for longer.
        connection.delete(batch.key, batch.rows_key)
        yield BAD
        yield from rows(250, start=250)

    with pytest.raises(UnknownJob, match="has expired; run it again"):
        batch.upload(expiring())
    assert connection.zcard(BATCHES_KEY) == 0
    left = list(connection.scan_iter("omlx:batch:*"))
    assert left
    assert all(connection.ttl(key) > 0 for key in left)


def test_an_upload_that_is_over_is_no_longer_renewed(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "UPLOAD_SECONDS", 1)
    batch = Batch.create(connection)
    with pytest.raises(KeyboardInterrupt):
        batch.upload(interrupted())
    wait_for(lambda: not connection.exists(batch.key, batch.rows_key), what="the expiry")


def interrupted() -> Iterator[Row]:
    yield from rows(250)
    raise KeyboardInterrupt


def test_a_feeder_forgets_a_batch_that_is_no_more(connection: redis.Redis) -> None:
    connection.zadd(BATCHES_KEY, {"batch-0123456789ab": 1})
    feeder = Feeder(connection)
    feeder.turn()
    assert connection.zcard(BATCHES_KEY) == 0

    def idle() -> bool:
        feeder.turn()
        return feeder.idle

    wait_for(idle, what="the feeder to have nothing left")
