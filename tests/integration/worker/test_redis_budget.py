"""What a step, a claim and an ending ask of Redis, counted by the server: calls over the network,
and the commands that scripts run there.

A worker shares its processor's time between decoding and these, so they are the price of the
queue. The figures are ceilings of what is there now: lower them when a change saves some.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from omlx_worker.engine.rows.emission import Emission
from omlx_worker.messages import Stepped
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.leases import QUEUES, claim
from tests.helpers.redis_server import RedisServer
from tests.helpers.traffic import Traffic
from tests.helpers.workers import enqueue

ROWS = 8
STEPS = 25

APPEND = {
    # Whether the lease is held, and whether somebody wants the job stopped.
    "zscore": 1,
    "hexists": 1,
    # Whether the stream still has the entry before; the first has none.
    "xrevrange": 1,
    "xadd": 1,
    "publish": 1,
    "expire": 1,
}
"""Commands for the tokens that a step gave one row."""

ENDING = 19
"""Commands for the end of one job: its record, result, registries and the end of its stream."""


@pytest.fixture
def server(private_server: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(private_server.url) as client:
        yield client


@pytest.fixture
def traffic(private_server: RedisServer, server: Redis) -> Iterator[Traffic]:
    # No lease is due for renewal while this runs.
    with Redis.from_url(private_server.url) as connection:
        leases = LeaseTable(connection, "worker-a", QUEUES, seconds=3600.0)
        for _ in range(ROWS):
            enqueue(server, max_completion_tokens=STEPS)
        with Traffic(leases, claim(leases, ROWS)) as traffic:
            yield traffic


def asked(server: Redis) -> dict[str, int]:
    """Calls of every command since the last `forget`, scripts' own included."""
    commands = server.info("commandstats")
    counts = {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in commands.items()}
    return {name: count for name, count in counts.items() if not name.startswith("config|")}


def forget(server: Redis) -> None:
    server.config_resetstat()


def test_a_step_is_one_call_however_many_rows_it_has(traffic: Traffic, server: Redis) -> None:
    traffic.step()
    forget(server)

    for _ in range(STEPS):
        traffic.step()

    counts = asked(server)
    assert counts.pop("evalsha") == STEPS
    assert counts["xadd"] == ROWS * STEPS
    most = {name: each * ROWS * STEPS for name, each in APPEND.items()}
    assert all(count <= most.get(name, 0) for name, count in counts.items()), counts


def test_rows_that_do_not_stream_are_asked_about_and_nothing_more(
    traffic: Traffic, server: Redis
) -> None:
    for job in traffic.jobs:
        job.streams = False
    traffic.step()
    forget(server)

    for _ in range(STEPS):
        traffic.step()

    counts = asked(server)
    assert counts.pop("evalsha") == STEPS
    assert set(counts) == {"zscore", "hexists"}
    assert max(counts.values()) == ROWS * STEPS


def test_steps_that_waited_go_out_in_one_call(traffic: Traffic, server: Redis) -> None:
    traffic.step()
    forget(server)
    # While the server answers nothing, the thread waits for the first of these.
    emissions = [Emission(job.rows[0].row_id, [7], "x") for job in traffic.jobs]
    server.client_pause(300, all=True)
    for _ in range(STEPS):
        traffic.outbox.add(emissions)
        traffic.mailbox.put(Stepped(emissions))
    traffic.wait()

    # One may have been under way.
    assert asked(server)["evalsha"] <= 2


def test_all_that_end_in_a_step_end_in_one_more_call(traffic: Traffic, server: Redis) -> None:
    first, *rest = traffic.jobs
    traffic.jobs = [first]
    traffic.step("length")
    traffic.jobs = rest
    forget(server)

    traffic.step("length")

    counts = asked(server)
    assert counts.pop("evalsha") == 2
    tokens = sum(APPEND.values()) * len(rest)
    assert sum(counts.values()) - tokens <= 6 + ENDING * len(rest), counts
    assert len(traffic.leases) == 0


def test_a_claim_is_one_call_however_many_jobs_it_takes(
    private_server: RedisServer, server: Redis
) -> None:
    for _ in range(ROWS):
        enqueue(server)
    with Redis.from_url(private_server.url) as connection:
        leases = LeaseTable(connection, "worker-a", QUEUES, seconds=3600.0)
        leases.claim(0)
        forget(server)
        assert len(claim(leases, ROWS)) == ROWS
        assert asked(server)["evalsha"] == 1
