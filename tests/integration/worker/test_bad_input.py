"""Jobs that can not be served fail alone, with one sentence, and nothing of theirs is run."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from rq import SimpleWorker
from rq.serializers import JSONSerializer

from omlx_producer.errors import one_line
from omlx_producer.wire import JOB_FUNCTION, GenerationRequest, InvalidRequest
from omlx_worker.control.payload import decode_request
from omlx_worker.control.status import StatusBoard
from omlx_worker.decode.thread import DecodeThread
from omlx_worker.delivery import publisher
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.fake_engine import BREAKS_PREPARE, BREAKS_READ, BREAKS_STEP, TOO_BUSY
from tests.helpers.leases import kill
from tests.helpers.server_time import forward
from tests.helpers.workers import (
    enqueue,
    enqueue_raw,
    events,
    queue,
    run_burst,
    running_worker,
    started,
    status,
    streamed_text,
    wait_for,
    worker_process,
)
from tests.integration.worker.hostile_jobs import Hostile, hostile_jobs, huge_jobs, request


def put(connection: Redis, job: Hostile) -> str:
    """Write a job straight into the queue; returns its id."""
    enqueue_raw(connection, job.data or b"", job.name, **job.fields)
    if job.data is None:
        connection.hdel(f"rq:job:{job.name}", "data")
    return job.name


def failure(connection: Redis, job_id: str) -> str:
    """The sentence with which a job has failed, as status, result, registry and stream tell it."""
    assert connection.hget(f"rq:job:{job_id}", "status") == b"failed", job_id
    assert connection.zscore(queue(connection).failed_job_registry.key, job_id), job_id
    ((_, fields),) = connection.xrange(f"rq:results:{job_id}")
    sentence = zlib.decompress(b64decode(fields[b"exc_string"])).decode()
    (event,) = events(connection, job_id)
    assert (event.type, event.error) == ("failed", sentence)
    return sentence


def resident_megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def all_over(connection: Redis, ids: list[str]) -> bool:
    with connection.pipeline() as pipeline:
        for job_id in ids:
            pipeline.hget(f"rq:job:{job_id}", "status")
        return {b"queued", b"started", b"bogus"}.isdisjoint(pipeline.execute())


@pytest.mark.slow
def test_hundreds_of_hostile_jobs_fail_with_one_sentence_each_and_good_ones_finish(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    trap = tmp_path / "unpickled"
    jobs = hostile_jobs(trap)
    assert len(jobs) >= 200
    good = []
    for number, job in enumerate(jobs):
        if number % 10 == 0:
            good.append(enqueue(connection, f"good {number}"))
        put(connection, job)
    with worker_process(redis_url, max_rows=16, step_seconds=0, lease_seconds=30):
        wait_for(lambda: all_over(connection, [job.name for job in jobs]), 120)
        wait_for(lambda: all_over(connection, [job.id for job in good]))
    assert not trap.exists()
    for job in jobs:
        sentence = failure(connection, job.name)
        assert 10 < len(sentence) <= 1000
        assert len(sentence.splitlines()) == 1
        assert "Traceback" not in sentence
    for job in good:
        assert status(job) == "finished"
        assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
    assert started(connection) == queue(connection).count == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_jobs_of_hundreds_of_megabytes_fail_and_leave_no_memory_behind(
    redis_url: str, connection: Redis
) -> None:
    with worker_process(redis_url, max_rows=16, step_seconds=0, lease_seconds=30) as worker:
        first = [enqueue(connection, f"before {number}") for number in range(20)]
        wait_for(lambda: all_over(connection, [job.id for job in first]))
        before = resident_megabytes(worker.pid)
        good, bad = [], []
        for job in huge_jobs():
            bad.append(put(connection, job))
            good.append(enqueue(connection, f"beside {job.name}"))
        wait_for(lambda: all_over(connection, [*bad, *(job.id for job in good)]), 120)
        after = resident_megabytes(worker.pid)
    assert all(failure(connection, job_id) for job_id in bad)
    assert {status(job) for job in good} == {"finished"}
    # The allocator keeps some of what it once had; the jobs together had over 500.
    assert after - before < 200


def test_ids_of_no_job_are_dropped(redis_url: str, connection: Redis) -> None:
    connection.rpush(queue(connection).key, "missing", "../etc", "a b", "*")
    good = enqueue(connection)
    run_burst(redis_url)
    assert status(good) == "finished"
    assert queue(connection).count == started(connection) == 0


@pytest.mark.parametrize("levels", [200, 300, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":[', "]}")])
def test_a_request_that_is_nested_too_deeply_is_told_so(
    levels: int, opening: str, closing: str
) -> None:
    value = opening * levels + closing * levels
    body = f'["{JOB_FUNCTION}", null, [], {{"request": {{"model": "fake", "x": {value}}}}}]'
    with pytest.raises(InvalidRequest, match=r"give at most 100$|flatten it$|shorten it$"):
        decode_request(body.encode(), "fake")


@pytest.mark.parametrize("levels", [100, 101, 150, 240])
def test_a_deep_field_is_taken_or_refused_alike_by_producers_and_workers(levels: int) -> None:
    value = json.loads('{"a":' * levels + "1" + "}" * levels)
    fields = {"model": "fake", "prompt": "x", "chat_template_kwargs": value}
    body = json.dumps([JOB_FUNCTION, None, [], {"request": fields}]).encode()
    if levels == 100:
        assert decode_request(body, "fake") == GenerationRequest.parse(fields)
        return
    for read in (lambda: decode_request(body, "fake"), lambda: GenerationRequest.parse(fields)):
        with pytest.raises(InvalidRequest) as caught:
            read()
        assert caught.value.field == "chat_template_kwargs"


@given(
    st.one_of(
        st.binary(),
        st.binary().map(zlib.compress),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        ).map(lambda value: json.dumps([JOB_FUNCTION, None, [], {"request": value}]).encode()),
        st.dictionaries(
            st.sampled_from([*GenerationRequest.model_fields, "max_tokens"]),
            st.none()
            | st.booleans()
            | st.floats()
            | st.integers()
            | st.text()
            | st.lists(st.text()),
        ).map(lambda value: json.dumps([JOB_FUNCTION, None, [], {"request": value}]).encode()),
    )
)
def test_any_payload_is_a_request_or_is_refused_with_one_sentence(data: bytes) -> None:
    try:
        decode_request(data, "fake")
    except InvalidRequest as error:
        sentence = one_line(str(error))
        assert sentence
        assert len(sentence.splitlines()) == 1


def test_fields_of_the_job_hash_that_make_no_sense_do_no_harm(
    redis_url: str, connection: Redis
) -> None:
    data = request()
    odd = enqueue_raw(connection, data, "odd", timeout="soon", result_ttl="1e999", failure_ttl="-")
    enqueue_raw(connection, data, "callback", timeout="x", success_callback_name="no.x")
    enqueue_raw(connection, b"x", "gone")
    connection.delete("rq:job:gone")
    run_burst(redis_url)
    assert status(odd) == "finished"
    assert connection.hget("rq:job:callback", "status") == b"failed"


def test_an_unexpected_error_while_preparing_fails_that_job_alone(
    redis_url: str, connection: Redis
) -> None:
    bad, good = enqueue(connection, BREAKS_PREPARE), enqueue(connection)
    run_burst(redis_url)
    assert status(bad) == "failed"
    assert "no tokenizer" in bad.latest_result().exc_string
    assert status(good) == "finished"


def test_a_job_that_the_machine_was_too_busy_to_prepare_is_no_invalid_request(
    redis_url: str, connection: Redis
) -> None:
    busy = enqueue(connection, TOO_BUSY)
    run_burst(redis_url)
    event = events(connection, busy.id)[-1]
    assert event.code == "failed"
    assert event.error == "the worker's machine was too busy; submit the job again"


@pytest.mark.parametrize(("owner", "makes"), [(publisher, "finished"), (ActiveJob, "take_event")])
def test_an_unexpected_error_while_making_a_result_or_an_event_fails_that_job_alone(
    redis_url: str,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    makes: str,
) -> None:
    before, bad, after = (enqueue(connection, max_completion_tokens=9) for _ in range(3))
    make = getattr(owner, makes)

    def breaks(job: ActiveJob) -> Any:
        if job.id == bad.id:
            raise RuntimeError("it quotes the text")
        return make(job)

    monkeypatch.setattr(owner, makes, breaks)
    with caplog.at_level(logging.INFO, "omlx_worker"):
        run_burst(redis_url)
    assert status(bad) == "failed"
    sentence = bad.latest_result().exc_string
    assert sentence.startswith("the worker failed to make the job's result (RuntimeError)")
    assert events(connection, bad.id)[-1].error == sentence
    for job in (before, after):
        assert status(job) == "finished"
        assert job.return_value()["choices"][0]["text"] == streamed_text(connection, job.id)
    assert started(connection) == queue(connection).count == 0
    assert "RuntimeError at publisher.py:" in caplog.text
    assert "it quotes the text" not in caplog.text


@pytest.mark.usefixtures("server_time")
@pytest.mark.slow
def test_a_job_that_breaks_its_worker_is_failed_in_the_end(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (enqueue(connection, max_completion_tokens=9) for _ in range(2))
    append = LeaseTable.append

    def breaks(table: LeaseTable, events: Sequence[tuple[Claim, Any]]) -> Any:
        if any(job.id == bad.id for job, _ in events):
            raise ValueError("not Redis's")
        return append(table, events)

    monkeypatch.setattr(LeaseTable, "append", breaks)

    for _ in range(6):
        with contextlib.suppress(ValueError):
            run_burst(redis_url)
        forward(connection, 31)

    assert status(bad) == "failed"
    assert "3 times" in bad.latest_result().exc_string
    run_burst(redis_url)
    assert status(good) == "finished"


@pytest.mark.usefixtures("server_time")
@pytest.mark.parametrize(("owner", "method"), [(DecodeThread, "_report"), (StatusBoard, "show")])
def test_a_worker_whose_decode_or_main_thread_breaks_leaves_its_jobs_to_the_sweep(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    job = enqueue(connection, max_completion_tokens=5000)
    whole = getattr(owner, method)

    def breaks(*arguments: Any) -> Any:
        if status(job) == "started":
            raise ValueError("a bug")
        return whole(*arguments)

    monkeypatch.setattr(owner, method, breaks)
    with running_worker(redis_url, burst=True) as worker:
        worker.test_thread.join(20)
    assert [str(error) for error in worker.test_errors] == ["a bug"]
    assert status(job) == "started"
    kill(connection)
    assert status(job) == "queued"


@pytest.mark.parametrize("prompt", [BREAKS_READ, BREAKS_STEP])
def test_an_engine_error_fails_the_jobs_it_hit_and_the_worker_goes_on(
    prompt: str, redis_url: str, connection: Redis
) -> None:
    bad = enqueue(connection, prompt)
    run_burst(redis_url, max_rows=1)
    good = enqueue(connection)
    run_burst(redis_url)
    assert status(bad) == "failed"
    assert "the engine failed on this job: RuntimeError" in bad.latest_result().exc_string
    assert status(good) == "finished"


def test_an_engine_that_keeps_failing_ends_the_worker_and_keeps_the_rest_queued(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, BREAKS_STEP) for _ in range(6)]
    with pytest.raises(RuntimeError, match="3 times in a row"):
        run_burst(redis_url, max_rows=1)
    assert [status(job) for job in jobs] == ["failed"] * 3 + ["queued"] * 3
    assert started(connection) == 0


def test_a_stock_worker_fails_such_a_job_with_the_sentence(connection: Redis) -> None:
    job = enqueue(connection)
    SimpleWorker([queue(connection)], connection=connection, serializer=JSONSerializer).work(
        burst=True, logging_level="CRITICAL"
    )
    assert status(job) == "failed"
    last_line = job.latest_result().exc_string.strip().splitlines()[-1]
    assert last_line.startswith("RuntimeError: this job needs an omlx-worker")
