"""Callbacks and webhooks: nobody waits for them but their own job, and not for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError
from rq import Callback, Webhook

from omlx_worker.control.rq_record import RecordedWorker
from tests.helpers.leases import QUEUES
from tests.helpers.webhooks import WebhookServer, webhook_server
from tests.helpers.workers import (
    enqueue,
    events,
    is_over,
    queue,
    run_burst,
    running_worker,
    status,
    wait_for,
)
from tests.integration.worker.test_rq_endings import remember_failure

HOST = frozenset({"127.0.0.1"})
begun, may_end = threading.Event(), threading.Event()


@pytest.fixture(autouse=True)
def _held_callbacks() -> Iterator[None]:
    begun.clear()
    may_end.clear()
    yield
    may_end.set()


@pytest.fixture
def server() -> Iterator[WebhookServer]:
    with webhook_server() as running:
        yield running


def hold(job: Any, connection: Redis, *_: Any) -> None:
    begun.set()
    may_end.wait(30)


def leave(job: Any, connection: Redis, *_: Any) -> None:
    raise SystemExit(1)


def named(function: Any) -> Callback:
    return Callback(f"{function.__module__}.{function.__name__}")


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("omlx_worker.control.callbacks.LIMIT_SECONDS", seconds)


def test_other_jobs_run_while_a_callback_hangs(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    first = enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    with running_worker(redis_url, max_rows=1):
        assert begun.wait(10)
        second = enqueue(connection)
        wait_for(lambda: is_over(second))
        assert (status(first), status(second)) == ("started", "finished")
        may_end.set()
        wait_for(lambda: is_over(first))
    assert status(first) == "finished"


def test_other_jobs_run_while_a_webhook_hangs(
    redis_url: str, connection: Redis, server: WebhookServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    server.answers.clear()
    enqueue(connection, webhooks=[Webhook(server.url, "finished", timeout=30)])
    with running_worker(redis_url, max_rows=1, allow_webhooks=HOST):
        wait_for(lambda: server.requests)
        other = enqueue(connection)
        wait_for(lambda: is_over(other))
        assert not server.answers.is_set()
        assert not server.hung_up
        server.answers.set()


def test_a_worker_takes_no_more_jobs_than_its_callbacks_can_follow(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    jobs = [enqueue(connection, on_success=named(hold), max_completion_tokens=5) for _ in range(4)]
    monkeypatch.setattr("omlx_worker.control.worker.POLL_SECONDS", 0.01)
    turns: list[bool] = []
    enqueue_due = RecordedWorker.enqueue_due
    monkeypatch.setattr(
        RecordedWorker, "enqueue_due", lambda self: (turns.append(True), enqueue_due(self))[1]
    )
    with running_worker(redis_url, max_rows=1) as worker:
        wait_for(lambda: sum(claim.ending for claim in worker._leases.jobs()) == 2)
        other = enqueue(connection, priority="high")
        before = len(turns)
        wait_for(lambda: len(turns) > before + 2)
        assert status(jobs[2]) == status(other) == "queued"
        may_end.set()
        wait_for(lambda: is_over(other) and all(map(is_over, jobs)))


def test_the_lease_is_renewed_while_a_callback_runs(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    started = queue(connection).started_job_registry
    assert queue(connection).name == QUEUES[1]

    def expiry() -> float:
        [(_, score)] = connection.zrange(started.key, 0, -1, withscores=True)
        return score

    with running_worker(redis_url, lease_seconds=1):
        assert begun.wait(10)
        first = expiry()
        wait_for(lambda: expiry() > first)
        may_end.set()


def test_a_callback_that_blocks_for_too_long_is_left_behind_and_fails_its_job(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 0.2)
    job = enqueue(
        connection,
        on_success=named(hold),
        on_failure=named(remember_failure),
        max_completion_tokens=5,
    )
    run_burst(redis_url)
    sentence = "the success callback failed: it ran longer than 0.2 s"
    assert status(job) == "failed"
    assert job.latest_result().exc_string == sentence
    assert events(connection, job.id)[-1].error == sentence
    assert connection.get("remembered").decode() == sentence


def test_a_callback_that_asks_to_exit_only_fails_its_job(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, on_success=named(leave))
    with running_worker(redis_url):
        wait_for(lambda: is_over(job))
        other = enqueue(connection)
        wait_for(lambda: is_over(other))
    assert (status(job), status(other)) == ("failed", "finished")
    assert job.latest_result().exc_string == "the success callback failed: SystemExit: 1"


def test_a_draining_worker_waits_for_a_callback(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    job = enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    with running_worker(redis_url) as worker:
        assert begun.wait(10)
        worker.stop()
        wait_for(lambda: worker._drain_ends is not None)
        assert status(job) == "started"
        may_end.set()
        worker.test_thread.join(10)
    assert status(job) == "finished"


def test_a_callback_may_end_after_the_drain(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    job = enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    with running_worker(redis_url, drain_timeout=0) as worker:
        assert begun.wait(10)
        worker.stop()
        worker._publisher._thread.join(10)
        may_end.set()
        worker.test_thread.join(10)
    assert status(job) == "finished"


def test_a_job_whose_callback_outlasts_the_drain_goes_back_to_its_queue(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 30)
    monkeypatch.setattr("omlx_worker.control.worker.LIMIT_SECONDS", 0.1)
    job = enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    with running_worker(redis_url, drain_timeout=0.1) as worker:
        assert begun.wait(10)
        worker.stop()
        worker.test_thread.join(10)
    assert status(job) == "queued"
    assert queue(connection).job_ids == [job.id]


def test_a_job_whose_ending_redis_does_not_take_goes_back_when_the_worker_stops(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        begun.set()
        raise ConnectionError("it may not have arrived")

    monkeypatch.setattr("omlx_worker.control.rq_endings.end_through_rq", breaks)
    job = enqueue(connection, on_success=named(hold), max_completion_tokens=5)
    with running_worker(redis_url, drain_timeout=0) as worker:
        assert begun.wait(10)
        worker.stop()
        worker.test_thread.join(20)
        assert worker.exit_code == 0
    assert status(job) == "queued"


def test_webhooks_are_sent_to_an_allowed_host(
    redis_url: str, connection: Redis, server: WebhookServer
) -> None:
    options = {"method": "POST"}
    good = enqueue(connection, webhooks=[Webhook(server.url + "/a", "finished", **options)])
    bad = enqueue(connection, n="two", webhooks=[Webhook(server.url + "/b", "failed", **options)])
    run_burst(redis_url, allow_webhooks=HOST)
    told = {path: json.loads(body) for _, path, body in server.requests}
    assert (told["/a"]["job_id"], told["/a"]["status"]) == (good.id, "finished")
    assert (told["/b"]["job_id"], told["/b"]["status"]) == (bad.id, "failed")
    assert told["/b"]["exc_info"].startswith("n: got 'two'")


@pytest.mark.parametrize("hosts", [frozenset(), frozenset({"localhost"})])
def test_a_webhook_to_another_host_is_refused_with_a_sentence(
    redis_url: str,
    connection: Redis,
    server: WebhookServer,
    caplog: pytest.LogCaptureFixture,
    hosts: frozenset[str],
) -> None:
    job = enqueue(connection, webhooks=[Webhook(server.url, "finished")])
    run_burst(redis_url, allow_webhooks=hosts)
    assert status(job) == "finished"
    assert server.requests == []
    assert "start the worker with --allow-webhooks 127.0.0.1 to allow it" in caplog.text


def test_a_webhook_follows_no_redirect(
    redis_url: str, connection: Redis, server: WebhookServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.location = "/elsewhere"
    hooks = [Webhook(server.url + path, "finished") for path in ("/first", "/second")]
    job = enqueue(connection, webhooks=hooks)
    run_burst(redis_url, allow_webhooks=HOST)
    assert status(job) == "finished"
    assert [path for _, path, _ in server.requests] == ["/first", "/second"]
    assert f"a webhook of job {job.id} failed: {server.url}/first answered 302" in caplog.text


def test_a_webhook_without_an_answer_is_cut_off(
    redis_url: str,
    connection: Redis,
    server: WebhookServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit(monkeypatch, 0.2)
    server.answers.clear()
    job = enqueue(connection, webhooks=[Webhook(server.url, "finished", timeout=30)])
    run_burst(redis_url, allow_webhooks=HOST)
    assert status(job) == "finished"
    assert any(f"of job {job.id} {end}" in caplog.text for end in ("failed", "were cut off"))
