"""The whole worker against a real server, with an engine that needs no model."""

from __future__ import annotations

import time

import pytest
from redis import Redis
from rq import Worker
from rq.defaults import RQ_KEY_PREFIX as RQ

from omlx_producer.producer import Producer
from omlx_producer.wire import MODELS_KEY, ModelInfo, events_key
from tests.helpers.leases import claim, roll_back, table, tokens
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    queue,
    rq_info,
    run_burst,
    running_worker,
    started,
    status,
    streamed_text,
    wait_for,
)


def test_fifty_jobs_at_once_all_finish_with_streams_equal_to_their_results(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, f"prompt {i}", max_completion_tokens=20) for i in range(50)]
    seen = set()
    with running_worker(redis_url, max_rows=16, step_seconds=0.004) as worker:
        while not all(map(is_over, jobs)):
            seen.add(started(connection))
            time.sleep(0.005)
    assert {status(job) for job in jobs} == {"finished"}
    assert max(seen) == worker.test_engine.most_rows == 16
    for job in jobs:
        body = job.return_value(refresh=True)
        assert body["choices"][0]["text"] == streamed_text(connection, job.id) != ""
        counts = [event.n for event in events(connection, job.id)]
        assert counts == sorted(counts)
        assert events(connection, job.id)[-1].type == "done"


def test_a_job_that_another_model_has_begun_starts_over(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    job, alone = (enqueue(connection, max_completion_tokens=9, seed=1) for _ in range(2))
    leases = table(connection)
    (begun,) = claim(leases)
    theirs = tokens(job.id, 4, 4).model_copy(update={"head": {"system_fingerprint": "fp_other"}})
    leases.append([(begun, theirs)])
    leases.give_back([begun])
    run_burst(redis_url)
    bodies = [each.return_value(refresh=True) for each in (job, alone)]
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert bodies[0]["system_fingerprint"] == "fp_fake"
    assert streamed_text(connection, job.id) == bodies[0]["choices"][0]["text"]
    assert "another model has written it" in caplog.text


def test_rq_info_tells_the_truth_while_jobs_run(redis_url: str, connection: Redis) -> None:
    jobs = [enqueue(connection, max_completion_tokens=500) for _ in range(7)]
    with running_worker(redis_url, max_rows=5, step_seconds=0.01):
        wait_for(lambda: all(len(events(connection, job.id)) > 1 for job in jobs[:5]))
        info = rq_info(redis_url)
        assert "queue omlx:fake:default 2, 5 executing, 0 finished, 0 failed" in info
        assert " busy omlx:fake:high, omlx:fake:default, omlx:fake:bulk" in info
        assert [status(job) for job in jobs].count("started") == 5
        executions = jobs[0].get_executions()
        assert len(executions) == 1
        assert executions[0].worker_name in info
        [record] = Worker.all(connection=connection)
        shown = {execution.job_id for execution in record.get_current_executions()}
        assert shown == {job.id for job in jobs[:5]}
    assert "queue omlx:fake:default 7, 0 executing" in rq_info(redis_url)
    assert "1 workers" not in rq_info(redis_url)


def test_an_idle_worker_says_so_and_counts_what_it_did(redis_url: str, connection: Redis) -> None:
    with running_worker(redis_url):
        job, bad = enqueue(connection), enqueue(connection, n="two")
        wait_for(lambda: is_over(job) and is_over(bad))
        wait_for(lambda: " idle " in rq_info(redis_url))
        assert "jobs: 1 finished, 1 failed" in rq_info(redis_url)


def test_the_record_of_a_finished_job_is_rqs_own(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, result_ttl=100)
    run_burst(redis_url)
    job.refresh()
    assert job.started_at <= job.ended_at
    result = job.latest_result()
    assert result.type == result.Type.SUCCESSFUL
    assert result.execution_id.startswith("omlx-")
    assert result.execution_started_at <= result.execution_ended_at
    assert job in queue(connection).finished_job_registry
    assert job.get_executions() == []
    for key in (job.key, f"{RQ}:results:{job.id}", events_key(job.id)):
        assert 0 < connection.ttl(key) <= 100


def test_a_job_without_a_result_lifetime_leaves_nothing_behind(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, result_ttl=0)
    run_burst(redis_url)
    left = {key.decode() for key in connection.keys("*" + job.id + "*")}
    assert left == {events_key(job.id)}
    assert 0 < connection.ttl(events_key(job.id)) <= 60


def test_every_choice_streams_and_all_are_in_the_result(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, n=5, max_completion_tokens=9)
    run_burst(redis_url, max_rows=2)
    choices = job.return_value()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4]
    for index, choice in enumerate(choices):
        assert choice["text"] == streamed_text(connection, job.id, index)
    assert len({choice["text"] for choice in choices}) == 5


def test_bulk_jobs_and_those_that_ask_stream_no_tokens(redis_url: str, connection: Redis) -> None:
    silent = [enqueue(connection, priority="bulk"), enqueue(connection, stream=False)]
    loud = [enqueue(connection), enqueue(connection, priority="bulk", stream=True)]
    run_burst(redis_url, step_seconds=0.01)
    assert [[e.type for e in events(connection, job.id)] for job in silent] == [["done"]] * 2
    assert all(len(events(connection, job.id)) > 2 for job in loud)


def test_a_producer_sees_a_chat_job_from_submit_to_result(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url), Producer(redis_url) as producer:
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        job = producer.submit(model=ALIAS, messages=[{"role": "user", "content": "hi"}], seed=3)
        texts = [c.text for e in job.stream() if e.type == "tokens" for c in e.choices]
        body = job.result(timeout=10)
    assert body["object"] == "chat.completion"
    assert body["id"] == f"chatcmpl-{job.id}"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "".join(texts)}
    assert body["usage"]["total_tokens"] == 2 + body["usage"]["completion_tokens"]


def test_a_worker_announces_its_model(redis_url: str, connection: Redis) -> None:
    run_burst(redis_url)
    info = ModelInfo.model_validate_json(connection.hget(MODELS_KEY, ALIAS))
    assert info.model == "fake"


def test_a_worker_is_known_again_after_redis_has_lost_its_data(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.control.rq_record.BEAT_SECONDS", 0.1)
    with running_worker(redis_url) as worker:
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        connection.flushall()
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        wait_for(lambda: worker.name in rq_info(redis_url))
        job = enqueue(connection)
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"


@pytest.mark.slow
def test_a_record_that_redis_has_lost_is_never_left_behind(
    redis_url: str, connection: Redis
) -> None:
    with running_worker(redis_url) as worker:
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        connection.delete(worker.key)
        job = enqueue(connection)
        wait_for(lambda: is_over(job) and connection.exists(worker.key))
        assert connection.ttl(worker.key) > 0


def test_a_ring_wakes_an_idle_worker_at_once(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.control.worker.POLL_SECONDS", 5.0)
    with running_worker(redis_url), Producer(redis_url) as producer:
        wait_for(lambda: connection.hexists(MODELS_KEY, ALIAS))
        time.sleep(0.2)
        began = time.monotonic()
        producer.submit(model=ALIAS, prompt="x").result(timeout=10)
        assert time.monotonic() - began < 2


def test_a_stream_that_lost_its_end_is_written_again(redis_url: str, connection: Redis) -> None:
    job = enqueue(connection, max_completion_tokens=300, stream=True)
    with running_worker(redis_url, step_seconds=0.004) as worker:
        wait_for(lambda: len(events(connection, job.id)) > 30)
        lost = events(connection, job.id)[:30]
        roll_back(connection, events_key(job.id), 10)
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"
    assert worker.decode_thread.counters.tokens <= 300, "none is made twice"
    assert events(connection, job.id)[:30] == lost
    counts = [0, *(event.n for event in events(connection, job.id)[:-1])]
    assert [event.since for event in events(connection, job.id)[:-1]] == counts[:-1]
    text = job.return_value(refresh=True)["choices"][0]["text"]
    assert text == streamed_text(connection, job.id)
