"""Servers that go away: for a moment, for good, or to come back without what they held."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
import redis

from omlx_producer.bulk import collector as collector_module
from omlx_producer.bulk.collector import Collector, turns
from omlx_producer.signals import StopSignals
from omlx_producer.wire.keys import BATCHES_KEY
from tests.helpers.bulk_rows import RUN, Kept, names, rows, waiting_rows
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import running_worker


def test_after_an_outage_all_rows_are_looked_at_at_once(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "RECONCILE_SECONDS", 1e9)
    collector = Collector(connection, RUN, rows(5), Kept())
    collector.turn(0.01)
    connection.flushall()
    collector.recover()
    collector.turn(0.01)
    assert len(waiting_rows(connection)) == 5


@pytest.mark.slow
def test_a_server_that_comes_back_empty_gets_its_rows_again(
    private_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "RECONCILE_SECONDS", 0.5)
    url = private_server.url
    with redis.Redis.from_url(url) as connection:
        sink, wanted = Kept(), rows(60)
        collector = Collector(connection, RUN, wanted, sink, window=40)
        killed, deadline = itertools.count(), time.monotonic() + 30

        def kill_once() -> None:
            assert time.monotonic() < deadline, "rows are missing"
            if sink.results and next(killed) == 0:
                private_server.kill()
                private_server.start()

        with running_worker(url, max_rows=4, step_seconds=0.005):
            for _ in turns(collector, StopSignals()):
                kill_once()
        assert sink.names == names(wanted)


def test_a_server_that_stays_away_ends_the_run(private_server: RedisServer) -> None:
    with redis.Redis.from_url(private_server.url, retry=None) as connection:
        collector = Collector(connection, RUN, rows(3), Kept())
        collector.turn(0.01)
        private_server.kill()
        with pytest.raises(redis.ConnectionError):
            list(turns(collector, StopSignals(), patience=0.3))


def test_a_server_that_takes_no_writes_for_a_while_is_waited_for(
    private_server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with redis.Redis.from_url(private_server.url) as connection:
        connection.config_set("min-replicas-to-write", 1)
        signals = StopSignals()
        collector = Collector(connection, RUN, rows(3), Kept())

        for _ in turns(collector, signals):
            connection.config_set("min-replicas-to-write", 0)
            if len(waiting_rows(connection)) == 3 and not signals.asked:
                signals.receive(signal.SIGINT)
        assert collector.stopped
    said = capsys.readouterr().err
    assert "Redis is unavailable" in said
    assert "NOREPLICAS" in said


def test_a_server_that_refuses_ends_the_run(connection: redis.Redis) -> None:
    connection.set(BATCHES_KEY, "of another kind")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        next(turns(Collector(connection, RUN, rows(3), Kept()), StopSignals()))


def test_an_interrupt_while_the_server_is_away_ends_the_run_at_once(
    private_server: RedisServer,
) -> None:
    with redis.Redis.from_url(private_server.url, retry=None) as connection:
        collector, signals = Collector(connection, RUN, rows(3), Kept()), StopSignals()
        collector.turn(0.01)
        private_server.kill()
        signals.receive(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            next(turns(collector, signals))
