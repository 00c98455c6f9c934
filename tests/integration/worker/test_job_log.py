"""The log says of each job when it starts and, once, how it leaves the worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis
from rq import Retry

from omlx_producer.client.cancel import cancel_job
from omlx_worker.messages import Drop, Lost
from tests.helpers.fake_engine import BREAKS_PREPARE, BREAKS_STEP
from tests.helpers.leases import claim, table
from tests.helpers.traffic import Traffic
from tests.helpers.workers import (
    enqueue,
    fetch,
    is_over,
    run_burst,
    running_worker,
    started,
    wait_for,
)


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "omlx_worker"):
        yield


def said(caplog: pytest.LogCaptureFixture, job_id: str) -> list[dict[str, Any]]:
    """The fields of the lines about a job."""
    return [vars(r) for r in caplog.records if r.name == "omlx_worker.jobs" and r.job == job_id]


def ended(caplog: pytest.LogCaptureFixture, job_id: str) -> dict[str, Any]:
    """The fields of the only line that is not the job's start."""
    [end] = [fields for fields in said(caplog, job_id) if fields["event"] != "starts"]
    return end


def test_a_finished_job_has_two_lines_with_its_figures(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, "secret words", max_completion_tokens=5)
    run_burst(redis_url)
    start, end = said(caplog, job.id)
    assert (start["event"], start["levelname"], start["prompt_tokens"]) == ("starts", "INFO", 12)
    assert (end["event"], end["levelname"], end["prompt_tokens"]) == ("finished", "INFO", 12)
    usage = fetch(connection, job.id).return_value()["usage"]
    assert end["tokens"] == usage["completion_tokens"] > 0
    assert end["finish_reason"] in ("stop", "length")
    assert (end["model"], end["priority"]) == ("fake", "default")
    assert end["queued_seconds"] >= 0
    assert end["run_seconds"] > 0
    assert "accepted" not in end
    assert "secret" not in caplog.text
    assert end["message"].startswith(f"job {job.id} finished: model fake, priority default, ")


def test_a_job_that_is_retried_says_so(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, BREAKS_PREPARE, retry=Retry(max=1))
    run_burst(redis_url)
    outcomes = [line["event"] for line in said(caplog, job.id)]
    assert outcomes == ["retried", "failed"]


def test_an_invalid_job_fails_without_its_prompt_in_the_log(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    for fields, error in (
        ({"prompt": {"text": "secret"}}, "prompt"),
        ({"secret": 1}, "the request"),
        ({"secret words": 1}, "the request"),
        ({"logit_bias": {"secret": 1}}, "logit_bias"),
    ):
        job = enqueue(connection, **fields)
        run_burst(redis_url)
        [end] = said(caplog, job.id)
        assert (end["event"], end["levelname"], end["error"]) == ("refused", "WARNING", error)
    assert "secret" not in caplog.text


def test_a_job_on_which_the_engine_breaks_says_why(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, BREAKS_STEP)
    run_burst(redis_url)
    end = ended(caplog, job.id)
    assert (end["event"], end["levelname"]) == ("failed", "WARNING")
    assert end["error"].startswith("the engine failed on this job: ")


def test_a_bulk_job_has_its_lines_at_debug_level(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, priority="bulk", max_completion_tokens=5)
    run_burst(redis_url)
    assert [fields["levelname"] for fields in said(caplog, job.id)] == ["DEBUG", "DEBUG"]


def test_jobs_that_are_stopped_time_out_or_go_back_say_which(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"max_completion_tokens": 9_000}
    with running_worker(redis_url, step_seconds=0.01, drain_timeout=0.0):
        slow = enqueue(connection, job_timeout=1, **long)
        cancelled, stays = enqueue(connection, **long), enqueue(connection, **long)
        wait_for(lambda: started(connection) == 3)
        cancel_job(connection, cancelled.id, keep_for=60)
        wait_for(lambda: is_over(cancelled) and is_over(slow))
    assert ended(caplog, cancelled.id)["event"] == "cancelled"
    assert "longer than its timeout" in ended(caplog, slow.id)["error"]
    assert (ended(caplog, stays.id)["event"], ended(caplog, stays.id)["levelname"]) == (
        "given back",
        "INFO",
    )


def test_a_job_whose_lease_is_gone_is_lost(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with running_worker(redis_url, step_seconds=0.01):
        job = enqueue(connection, max_completion_tokens=9_000)
        wait_for(lambda: started(connection))
        connection.delete(*connection.keys("rq:wip:*"))
        connection.hset(job.key, "status", "canceled")
        wait_for(lambda: [f for f in said(caplog, job.id) if f["event"] == "lost"])
    end = ended(caplog, job.id)
    assert (end["levelname"], end["error"]) == ("WARNING", "the lease is gone, the job is canceled")


def test_a_time_in_the_queue_that_cannot_be_read_is_left_out(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection, max_completion_tokens=5)
    connection.hset(job.key, "enqueued_at", "\x1b[2J")
    run_burst(redis_url)
    assert "queued_seconds" not in ended(caplog, job.id)


def test_a_job_that_its_worker_claims_again_is_lost_once(
    connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job = enqueue(connection)
    leases = table(connection)
    with Traffic(leases, claim(leases)) as traffic:
        for _ in range(2):
            traffic.mailbox.put(Drop(traffic.jobs[0].claim, Lost()))
    assert ended(caplog, job.id)["event"] == "lost"
