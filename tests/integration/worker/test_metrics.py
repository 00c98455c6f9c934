"""What Prometheus reads from a worker, over HTTP."""

from __future__ import annotations

import re
import socket
import urllib.request
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis

from omlx_producer.bulk.batch import Batch
from omlx_producer.bulk.row import Row
from omlx_producer.client.cancel import cancel_job
from omlx_producer.client.outcome import results_key
from omlx_producer.wire import MODELS_KEY, GenerationRequest
from omlx_worker import cli, options
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from tests.helpers.fake_engine import BREAKS_STEP, FakeEngine
from tests.helpers.metrics import measured_worker, scrape, value
from tests.helpers.redis_server import RedisServer
from tests.helpers.workers import ALIAS, enqueue, fetch, is_over, loads, wait_for


def usage(connection: Redis, job: Any, name: str) -> int:
    return int(fetch(connection, job.id).return_value()["usage"][name])


def test_the_counts_are_those_of_what_ran(redis_url: str, connection: Redis) -> None:
    with measured_worker(redis_url, step_seconds=0.001) as (_, port):
        before = scrape(port)
        jobs = [enqueue(connection, "word " * n, n=2) for n in range(1, 6)]
        urgent = enqueue(connection, priority="high", max_completion_tokens=3)
        wait_for(lambda: all(map(is_over, (*jobs, urgent))))
        breaks = enqueue(connection, BREAKS_STEP)
        wait_for(lambda: is_over(breaks))
        stays = enqueue(connection, max_completion_tokens=9_000)
        wait_for(lambda: value(scrape(port), "jobs_held"))
        cancel_job(connection, stays.id, keep_for=60)
        wait_for(lambda: is_over(stays))
        after = wait_for(
            lambda: (found := scrape(port)) and value(found, "jobs_total") == 8 and found
        )
    done = [*jobs, urgent]
    assert value(before, "jobs_total") == 0
    outcomes = {name: value(after, "jobs_total", outcome=name) for name in ("finished", "failed")}
    assert outcomes == {"finished": 6, "failed": 1}
    assert value(after, "jobs_total", outcome="cancelled") == 1
    rows = sum(len(fetch(connection, job.id).return_value()["choices"]) for job in done)
    assert value(after, "request_success_total") == rows == 11
    tokens = sum(usage(connection, job, "completion_tokens") for job in done)
    assert value(after, "generation_tokens_total") >= tokens
    for name in ("e2e_request_latency_seconds_count", "time_to_first_token_seconds_count"):
        assert value(after, name, priority="high") == 1
    assert value(after, "e2e_request_latency_seconds_count", priority="default") == 5
    assert value(after, "request_queue_time_seconds_count") == 8
    assert value(after, "inter_token_latency_seconds_sum") > 0
    assert value(after, "num_requests_running") == value(after, "jobs_held") == 0
    assert value(after, "decode_rows_total") >= value(after, "steps_total") > 0
    assert value(after, "redis_up") == value(after, "workers", model_name=ALIAS) == 1


def test_an_end_that_redis_does_not_take_is_told_apart_from_a_request_that_is_refused(
    redis_url: str, connection: Redis
) -> None:
    enqueue(connection, "")
    full = enqueue(connection)
    last = 2**64 - 1
    connection.xadd(results_key(full.id), {"no": "other"}, id=f"{last}-{last}")
    with measured_worker(redis_url) as (_, port):
        found = wait_for(lambda: (s := scrape(port)) and value(s, "jobs_total") == 2 and s)
    outcomes = {name: value(found, "jobs_total", outcome=name) for name in ("refused", "unwritten")}
    assert outcomes == {"refused": 1, "unwritten": 1}


def test_tokens_and_prompts_are_counted_exactly(redis_url: str, connection: Redis) -> None:
    with measured_worker(redis_url) as (_, port):
        jobs = [enqueue(connection, "x" * n) for n in (3, 50, 400)]
        wait_for(lambda: all(map(is_over, jobs)))
        found = wait_for(lambda: (s := scrape(port)) and value(s, "jobs_total") == 3 and s)
    tokens = sum(usage(connection, job, "completion_tokens") for job in jobs)
    assert value(found, "generation_tokens_total") == tokens
    assert value(found, "prompt_tokens_total") == 453
    assert value(found, "prefix_cache_queries_total") == 453
    assert value(found, "prefix_cache_hits_total") == 0
    assert value(found, "memory_limit_bytes") == 2**30


def test_drafts_are_told_by_source_and_place(redis_url: str, connection: Redis) -> None:
    with measured_worker(redis_url) as (worker, port):
        claim = Claim("j", "omlx-1", f"omlx:{ALIAS}:bulk", 0.0, 0, b"", None)
        request = GenerationRequest(model=ALIAS, prompt="x")
        job = ActiveJob(claim, request, FakeEngine().prepare(request, "j"), streams=True)
        steps = [
            Emission("j:0", [1, 2, 3], "", drafted=3, accepted=2),
            Emission("j:0", [1], "", drafted=1, accepted=0),
            Emission("j:0", [1, 2], "", drafted=1, accepted=1, source="lookup"),
        ]
        for at, step in enumerate(steps):
            worker.observers.stepped([(job, step)], float(at))
        found = scrape(port)
    drafted = {
        source: value(found, "spec_decode_num_draft_tokens_total", source=source)
        for source in ("model", "lookup")
    }
    assert drafted == {"model": 4, "lookup": 1}
    assert value(found, "spec_decode_num_accepted_tokens_total", source="model") == 2
    places = "spec_decode_num_accepted_tokens_per_pos_total"
    by_place = [value(found, places, source="model", position=str(n)) for n in range(3)]
    assert by_place == [1, 1, 0]
    assert value(found, "inter_token_latency_seconds_count", priority="bulk") == 2
    assert value(found, "inter_token_latency_seconds_sum", priority="bulk") == 2.0


def batch_of(connection: Redis, rows: int, model: str = ALIAS) -> Batch:
    batch = Batch.create(connection)
    requests = [GenerationRequest(model=model, prompt=f"p{n}") for n in range(rows)]
    batch.upload(Row(str(n), n, each, f"{n:024}") for n, each in enumerate(requests, 1))
    return batch


def test_a_batch_is_told_while_it_waits_and_when_it_has_ended(
    redis_url: str, connection: Redis
) -> None:
    with measured_worker(redis_url) as (_, port):
        idle = scrape(port)
        other = batch_of(connection, 3, "nobody")
        waiting = scrape(port)
        mine = batch_of(connection, 5)
        wait_for(lambda: mine.read().over)
        ended = scrape(port)
        other.cancel()
        cancelled, again = scrape(port), scrape(port)
    count = "batch_job_e2e_latency_seconds_count"
    assert value(idle, count) == value(idle, "batches_open") == 0
    assert value(waiting, "batch_rows", state="waiting") == 3
    assert value(waiting, "queue_length", model_name="nobody", priority="bulk") == 3
    assert value(waiting, "workers", model_name="nobody") == 0
    assert value(ended, count, status="completed") == 1
    assert value(ended, "batches_open") == 1
    state = mine.read()
    assert state.ended_at is not None
    seconds = value(ended, "batch_job_e2e_latency_seconds_sum", status="completed")
    assert seconds == pytest.approx(state.ended_at - state.created_at)
    assert [value(each, count, status="cancelled") for each in (ended, cancelled, again)] == [
        0,
        1,
        1,
    ]


def test_the_age_of_the_oldest_row_is_told_where_no_worker_serves_its_model(
    redis_url: str, connection: Redis
) -> None:
    batch = batch_of(connection, 2, "nobody")
    key = batch.waiting_key("omlx:nobody:bulk")
    [first, *_] = connection.lrange(key, 0, 0)
    head, _, body = first.partition(b"\n")
    name, digest, _, custom_id = head.split(b" ", 3)
    old = b" ".join([name, digest, b"2026-01-01T00:00:00.000000Z", custom_id])
    connection.lset(key, 0, old + b"\n" + body)
    with measured_worker(redis_url) as (_, port):
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        found = scrape(port)
    assert value(found, "queue_oldest_seconds", model_name="nobody") > 86_400
    assert value(found, "queue_oldest_seconds", model_name=ALIAS) == 0


@pytest.mark.slow
def test_a_scrape_answers_while_redis_is_away(private_server: RedisServer) -> None:
    with measured_worker(private_server.url) as (worker, port):
        assert value(scrape(port), "redis_up") == 1
        private_server.stop()
        wait_for(lambda: worker.redis_failures)
        found = scrape(port)
        private_server.start()
        wait_for(lambda: not worker.redis_away)
        back = scrape(port)
    assert value(found, "redis_up") == 0
    assert value(found, "redis_away_seconds") > 0
    assert value(found, "redis_failures_total") > 0
    assert not [name for name, _ in found if name == "omlx_workers"]
    assert (value(back, "redis_up"), value(back, "redis_away_seconds")) == (1, 0)


# The command


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    loads(monkeypatch, lambda *_: FakeEngine())


@pytest.mark.usefixtures("_fake")
def test_the_command_serves_metrics_on_this_machine_alone(
    redis_url: str,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pages: list[str] = []

    def load(*_: object) -> FakeEngine:
        (url,) = re.findall(r"metrics are at (http://127\.0\.0\.1:\d+/metrics)", caplog.text)
        with urllib.request.urlopen(url, timeout=20) as answer:
            pages.append(answer.read().decode())
        return FakeEngine()

    loads(monkeypatch, load)
    arguments = ["run", "-m", "fake", "--redis-url", redis_url, "--metrics-port", "0", "--burst"]
    with caplog.at_level("INFO"):
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, result.output
    assert "omlx_redis_up 1.0" in pages[0], "also while the model is loaded"


@pytest.mark.usefixtures("_fake")
def test_a_port_that_is_taken_is_one_sentence(redis_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["run", "-m", "fake", "--redis-url", redis_url, "--metrics-port", port]
        result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2
    assert f"--metrics-port {port}: nothing can be served there (Address already in use)" in (
        result.stderr
    )


def test_a_missing_package_is_one_sentence(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = options.find_spec
    monkeypatch.setattr(
        options, "find_spec", lambda name: None if name == "prometheus_client" else found(name)
    )
    result = CliRunner().invoke(cli.main, ["run", "-m", "fake", "--metrics-port", "9400"])
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "prometheus_client is not installed; install it with: pip install 'omlx-queue[worker]'\n"
    )


@pytest.mark.parametrize("port", ["-1", "65536", "web"])
def test_a_wrong_port_is_named(port: str) -> None:
    result = CliRunner().invoke(cli.main, ["run", "-m", "fake", f"--metrics-port={port}"])
    assert result.exit_code == 2
    assert f"--metrics-port: got {port}; give a whole number from 0 to 65535" in result.stderr
