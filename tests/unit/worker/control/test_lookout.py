"""A few idle workers look for jobs, and no job waits because of that."""

from __future__ import annotations

import time

import fakeredis
import pytest

from omlx_producer.client.workers import workers_key
from omlx_worker.control import lookout
from omlx_worker.control.lookout import FEW, Lookout


@pytest.fixture
def connection() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis()


def crew(connection: fakeredis.FakeRedis, count: int) -> list[Lookout]:
    """Workers that have looked once, when they started."""
    connection.hset(workers_key("m"), mapping={f"w{n}": "" for n in range(count)})
    workers = [Lookout(connection, "m", f"w{n}") for n in range(count)]
    assert all(worker.is_due() for worker in workers)
    return workers


def test_one_idle_worker_looks_for_all(connection: fakeredis.FakeRedis) -> None:
    workers = crew(connection, 20)
    for _ in range(3):
        assert [worker.is_due() for worker in workers].count(True) == 1


def test_another_one_takes_over(
    connection: fakeredis.FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "TERM_SECONDS", 0.05)
    gone, other = crew(connection, 2)
    assert gone.is_due()
    assert not other.is_due()
    time.sleep(0.1)
    assert other.is_due()
    assert not gone.is_due()


def test_every_worker_looks_now_and_then(
    connection: fakeredis.FakeRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "LOOK_SECONDS", 0.0)
    assert all(worker.is_due() for worker in crew(connection, 5))


def test_a_ring_for_one_job_is_heard_by_a_few_and_one_for_many_by_all(
    connection: fakeredis.FakeRedis,
) -> None:
    workers = crew(connection, 1000)
    heard = sum(worker.hears(b"1") for worker in workers for _ in range(20)) / 20
    assert FEW / 2 < heard < 2 * FEW
    assert all(worker.hears(b"1000") for worker in workers)


@pytest.mark.parametrize("payload", [b"1", b"", b"resume", b"-3"])
def test_a_few_workers_hear_every_ring(connection: fakeredis.FakeRedis, payload: bytes) -> None:
    assert all(worker.hears(payload) for worker in crew(connection, FEW))
