"""Jobs that can not be served fail alone, with one sentence, and nothing of theirs is run."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import SimpleWorker
from rq.serializers import JSONSerializer

from tests.worker.fake_engine import BREAKS_PREFILL, BREAKS_PREPARE, BREAKS_STEP
from tests.worker.running import (
    enqueue,
    enqueue_raw,
    events,
    queue,
    run_burst,
    started,
    status,
)


def compressed(text: str) -> bytes:
    return zlib.compress(text.encode())


def call(request: str, function: str = "omlx_worker.jobs.generate") -> bytes:
    return compressed(f'["{function}", null, [], {{"request": {request}}}]')


def test_malformed_jobs_fail_with_one_sentence_and_good_ones_finish(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    trap = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (trap,))

    bad = {
        "pickle": pickle.dumps((Trap(), None, (), {})),
        "zpickle": zlib.compress(pickle.dumps((Trap(), None, (), {}))),
        "oldpickle": pickle.dumps((Trap(), None, (), {}), protocol=0),
        "text": compressed("hello"),
        "garbage": b"\xff\x00\x01",
        "empty": b"",
        "scalar": compressed("3"),
        "short": compressed('["f"]'),
        "function": call("{}", "os.system"),
        "args": compressed('["omlx_worker.jobs.generate", null, [1], {}]'),
        "kwargs": compressed('["omlx_worker.jobs.generate", null, [], {"other": 1}]'),
        "nan": call('{"model": "fake", "prompt": "x", "temperature": NaN}'),
        "huge": call('{"model": "fake", "prompt": "x", "seed": ' + "9" * 5000 + "}"),
        "deep": compressed("[" * 100_000 + "]" * 100_000),
        "field": call('{"model": "fake", "prompt": "x", "colour": 1}'),
        "model": call('{"model": "other", "prompt": "x"}'),
        "range": call('{"model": "fake", "prompt": "x", "temperature": 3}'),
        "nothing": call('{"model": "fake", "prompt": ""}'),
        "context": call('{"model": "fake", "prompt": "' + "x" * 20_000 + '"}'),
    }
    sentences = {
        "pickle": "pickle",
        "zpickle": "pickle",
        "oldpickle": "not JSON",
        "text": "not JSON",
        "function": "os.system",
        "field": "colour",
        "model": "'other'",
        "range": "temperature",
        "context": "20000 tokens",
        "nan": "NaN",
    }
    good = [enqueue(connection)]
    jobs = {name: enqueue_raw(connection, data, name) for name, data in bad.items()}
    good.append(enqueue(connection))
    run_burst(redis_url, max_rows=32)
    assert [status(job) for job in good] == ["finished", "finished"]
    assert not trap.exists()
    for name, job in jobs.items():
        assert status(job) == "failed", name
        sentence = job.latest_result().exc_string
        assert sentence
        assert "\n" not in sentence
        assert sentences.get(name, "") in sentence
        (event,) = events(connection, name)
        assert event.type == "failed"
        assert event.error == sentence
        assert job in queue(connection).failed_job_registry


def test_fields_of_the_job_hash_that_make_no_sense_do_no_harm(
    redis_url: str, connection: Redis
) -> None:
    data = call('{"model": "fake", "prompt": "x"}')
    odd = enqueue_raw(connection, data, "odd", timeout="soon", result_ttl="1e999", failure_ttl="-")
    enqueue_raw(connection, data, "callback", timeout="x", success_callback_name="no.x")
    enqueue_raw(connection, b"x", "gone")
    connection.delete("rq:job:gone")
    run_burst(redis_url)
    assert status(odd) == "finished"
    assert connection.hget("rq:job:callback", "status") == b"finished"


def test_an_unexpected_error_while_preparing_fails_that_job_alone(
    redis_url: str, connection: Redis
) -> None:
    bad, good = enqueue(connection, BREAKS_PREPARE), enqueue(connection)
    run_burst(redis_url)
    assert status(bad) == "failed"
    assert "no tokenizer" in bad.latest_result().exc_string
    assert status(good) == "finished"


@pytest.mark.parametrize("prompt", [BREAKS_PREFILL, BREAKS_STEP])
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
