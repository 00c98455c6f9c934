"""Who is let in and in which order, through the whole worker against a real server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError
from rq.job import Job

from omlx_producer.wire import GenerationRequest
from omlx_worker.control import status as status_board
from omlx_worker.control.admission import Admission
from omlx_worker.control.intake import Intake
from omlx_worker.decode import scheduler
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.delivery.observers import Observers
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.row import Row
from omlx_worker.messages import Admit, DecodeMessage, Drop, MainMailbox, Prepared, TrafficMessage
from omlx_worker.queue import order
from omlx_worker.queue.claim import Claim
from tests.helpers.fake_engine import BYTES_A_TOKEN, FakeEngine, expected
from tests.helpers.leases import table
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    queue,
    running_worker,
    started,
    status,
    wait_for,
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Gives waiting jobs their turn after these seconds."""

    def within(seconds: float) -> None:
        for module in (order, scheduler):
            monkeypatch.setattr(module, "PATIENCE_SECONDS", seconds)

    return within


def request_of(job: Job) -> GenerationRequest:
    return GenerationRequest.parse(job.kwargs["request"])


@pytest.mark.slow
def test_what_does_not_fit_in_memory_waits_in_redis(redis_url: str, connection: Redis) -> None:
    """Rows of 1,005 tokens, and room for three of them, one of which is reading its prompt."""
    jobs = [enqueue(connection, max_completion_tokens=1000) for _ in range(6)]
    limit = 3 * 1005 * BYTES_A_TOKEN + 5 * BYTES_A_TOKEN
    with running_worker(redis_url, max_rows=16, step_seconds=0.001, memory_limit=limit) as worker:
        wait_for(lambda: worker.decode_thread.counters.tokens > 100)
        for _ in range(20):
            assert (started(connection), queue(connection).count) == (3, 3)
            time.sleep(0.01)
        wait_for(lambda: all(map(is_over, jobs)))
    assert worker.test_engine.most_rows == 3
    assert {status(job) for job in jobs} == {"finished"}


def test_a_job_of_more_choices_than_the_batch_has_places_asks_for_no_more_memory(
    redis_url: str, connection: Redis
) -> None:
    """Room for one row of 1,005 tokens and three short ones."""
    long = enqueue(connection, max_completion_tokens=1000)
    limit = 1200 * BYTES_A_TOKEN
    with running_worker(redis_url, max_rows=4, step_seconds=0.002, memory_limit=limit):
        wait_for(lambda: started(connection) == 1)
        many = enqueue(connection, n=128, max_completion_tokens=4)
        wait_for(lambda: is_over(many))
        assert not is_over(long)
    assert len(many.return_value()["choices"]) == 128


@pytest.mark.parametrize(("places", "memory"), [(1, 2**30), (4, 2**30), (4, 150 * BYTES_A_TOKEN)])
def test_a_job_of_many_choices_holds_back_no_other_job(
    redis_url: str, connection: Redis, impatient: Callable[[float], None], places: int, memory: int
) -> None:
    many = enqueue(connection, priority="high", n=128, max_completion_tokens=50)
    impatient(0.2)
    with running_worker(redis_url, max_rows=places, step_seconds=0.002, memory_limit=memory):
        wait_for(lambda: events(connection, many.id))
        others = [
            enqueue(connection, priority=each, max_completion_tokens=4)
            for each in ("high", "default", "high")
        ]
        wait_for(lambda: all(map(is_over, others)))
        assert not is_over(many)


def test_texts_that_are_read_leave_their_places_to_other_jobs(
    redis_url: str, connection: Redis
) -> None:
    enqueue(connection, prompt=None, input=["a", "b", "c", "d" * 5000])
    alone, read_on = threading.Event(), threading.Event()
    with running_worker(redis_url, max_rows=4, vector_size=4) as worker:
        engine = worker.test_engine
        read = engine.read

        def waits(tokens: Mapping[Row, int]) -> list[Emission]:
            if len(engine.states) == 1:
                alone.set()
                read_on.wait(20)
            return read(tokens)

        engine.read = waits
        wait_for(alone.is_set)
        other = enqueue(connection, prompt=None, input="e")
        wait_for(lambda: status(other) == "started")
        read_on.set()
        wait_for(lambda: is_over(other))


@pytest.mark.parametrize(
    "trouble",
    [ResponseError("BUSY Redis is busy running a script."), ConnectionError("reset by peer")],
)
def test_what_was_claimed_when_redis_got_into_trouble_is_claimed_again(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch, trouble: RedisError
) -> None:
    aged, troubles = Intake._age, [trouble]

    def age(self: Intake, claim: Claim) -> float:
        if troubles:
            raise troubles.pop()
        return aged(self, claim)

    monkeypatch.setattr(Intake, "_age", age)
    jobs = [enqueue(connection, completion_window="24h") for _ in range(3)]
    with running_worker(redis_url):
        wait_for(lambda: all(map(is_over, jobs)))
    assert {status(job) for job in jobs} == {"finished"}
    assert troubles == []


def test_a_worker_that_ends_gives_back_what_a_claim_without_an_answer_took(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_worker(redis_url) as worker:
        claim = worker.leases._claim

        def lose_answer(*args: Any, **kwargs: Any) -> Any:
            if (reply := claim(*args, **kwargs)) and reply[1]:
                worker.stop()
                raise ConnectionError("reset by peer")
            return reply

        monkeypatch.setattr(worker.leases, "_claim", lose_answer)
        job = enqueue(connection)
        worker.test_thread.join(20)
    assert status(job) == "queued"
    assert connection.lrange(queue(connection).key, 0, -1) == [job.id.encode()]


def test_jobs_come_out_in_their_order_although_some_were_sent_back(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue(connection, max_completion_tokens=40) for _ in range(8)]
    limit = 60 * BYTES_A_TOKEN  # one at a time
    with running_worker(redis_url, step_seconds=0.001, memory_limit=limit):
        wait_for(lambda: all(map(is_over, jobs)))
    for job in jobs:
        job.refresh()
    ends = [job.ended_at for job in jobs]
    assert ends == sorted(ends)


def test_a_request_that_could_never_fit_is_refused_with_the_figures(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, max_completion_tokens=5000)
    small = enqueue(connection)
    with running_worker(redis_url, memory_limit=2**20):
        wait_for(lambda: is_over(job) and is_over(small))
    assert (status(job), status(small)) == ("failed", "finished")
    sentence = events(connection, job.id)[-1].error
    assert re.match(
        r"max_completion_tokens: with its prompt the job may come to 5005 tokens, which take "
        r"4\.9 MiB; beside .* this worker has 1\.0 MiB of 1\.0 MiB \(--memory-limit\)",
        sentence,
    )


def test_a_job_without_a_limit_gets_what_memory_allows(redis_url: str, connection: Redis) -> None:
    prompt, default = 100, 16
    job = enqueue(connection, "x" * prompt)
    limit = BYTES_A_TOKEN * (2 * prompt + default // 2)
    with running_worker(redis_url, memory_limit=limit):
        wait_for(lambda: is_over(job))
    assert status(job) == "finished", events(connection, job.id)
    assert events(connection, job.id)[-1].usage.completion_tokens <= default // 2


def test_a_job_that_could_never_fit_takes_no_room_from_those_claimed_with_it(
    connection: Redis,
) -> None:
    large = enqueue(connection, max_completion_tokens=5000)
    small = [enqueue(connection) for _ in range(2)]
    leases, engine = table(connection), FakeEngine()
    budget = MemoryBudget(2**20, engine.weight_bytes, engine.bytes_for)
    submitted: list[DecodeMessage] = []
    traffic: SimpleQueue[TrafficMessage] = SimpleQueue()
    main: MainMailbox = SimpleQueue()
    admission = Admission(
        leases,
        engine,
        budget,
        alias=ALIAS,
        main=main,
        submit=submitted.append,
        traffic=traffic,
        observers=Observers(),
    )
    assert admission.take(engine.max_rows, engine.max_rows)
    for _ in range(3):
        message = main.get(timeout=5)
        assert isinstance(message, Prepared)
        admission.prepared(message)
    assert not admission.take(engine.max_rows, engine.max_rows)
    admission.close()
    refused = traffic.get_nowait()
    assert isinstance(refused, Drop)
    assert refused.claim.id == large.id
    assert traffic.empty()
    [admitted] = submitted
    assert isinstance(admitted, Admit), "both at once, to be read together"
    assert [job.id for job in admitted.jobs] == [job.id for job in small]


def test_a_high_job_takes_the_place_of_a_bulk_row_which_then_goes_on(
    redis_url: str, connection: Redis
) -> None:
    bulk = [enqueue(connection, f"b{i}", "bulk", max_completion_tokens=400) for i in range(2)]
    with running_worker(redis_url, max_rows=2, step_seconds=0.003) as worker:
        wait_for(lambda: worker.decode_thread.counters.tokens > 50)
        high = enqueue(connection, "urgent", "high", max_completion_tokens=20)
        wait_for(lambda: is_over(high))
        assert not any(map(is_over, bulk))
        assert worker.decode_thread.counters.pauses == 1
        wait_for(lambda: all(map(is_over, bulk)))
    assert worker.test_engine.most_rows == 2
    for job in bulk:
        [row] = worker.test_engine.prepare(request_of(job), job.id)
        choice = job.return_value(refresh=True)["choices"][0]
        assert choice["text"] == expected(row)[1]


def test_a_worker_with_enough_bulk_rows_still_takes_other_jobs(connection: Redis) -> None:
    for priority in ("bulk", "bulk", "default"):
        enqueue(connection, priority=priority)
    leases = table(connection)
    admission = Admission(
        leases,
        engine := FakeEngine(),
        MemoryBudget(2**20, 0, engine.bytes_for),
        alias=ALIAS,
        main=SimpleQueue(),
        submit=lambda _: None,
        traffic=SimpleQueue(),
        observers=Observers(),
    )
    takes = [admission.take(16, bulk_rows) for bulk_rows in (0, 0, 1, 2, 2)]
    admission.close()
    assert takes == [True, False, False, True, False]
    assert [job.queue.rpartition(":")[2] for job in leases.jobs()] == ["default", "bulk"]


@pytest.mark.slow
def test_more_bulk_rows_run_while_many_wait(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are counted so often.
    monkeypatch.setattr(status_board, "WRITE_SECONDS", 0.05)
    jobs = [enqueue(connection, f"{n}", "bulk", max_completion_tokens=110) for n in range(110)]
    with running_worker(redis_url, max_rows=64, step_seconds=0.01) as worker:
        wait_for(lambda: all(map(is_over, jobs)))
        assert worker.decode_thread.counters.decode_rows == 110 * 110, "no step was run twice"
    assert worker.test_engine.most_rows == 64


@pytest.mark.slow
def test_a_paused_row_gives_up_its_cache_where_memory_is_short_and_still_loses_nothing(
    redis_url: str, connection: Redis
) -> None:
    bulk = enqueue(connection, "b", "bulk", max_completion_tokens=600)
    limit = 1000 * BYTES_A_TOKEN
    with running_worker(redis_url, max_rows=4, step_seconds=0.002, memory_limit=limit) as worker:
        wait_for(lambda: worker.decode_thread.counters.tokens > 50)
        high = enqueue(connection, "h", "high", max_completion_tokens=980)
        wait_for(lambda: is_over(high))
        wait_for(lambda: is_over(bulk))
        assert worker.decode_thread.counters.prompt_tokens > 50, "its tokens were read again"
    [row] = worker.test_engine.prepare(request_of(bulk), bulk.id)
    assert bulk.return_value(refresh=True)["choices"][0]["text"] == expected(row)[1]


def test_a_bulk_job_is_reached_under_a_steady_stream_of_high_ones(
    redis_url: str, connection: Redis, impatient: Callable[[float], None]
) -> None:
    impatient(0.5)
    high = [enqueue(connection, f"h{i}", "high", max_completion_tokens=15) for i in range(300)]
    bulk = enqueue(connection, "b", "bulk", max_completion_tokens=15)
    with running_worker(redis_url, max_rows=2, step_seconds=0.004):
        wait_for(lambda: is_over(bulk))
        assert queue(connection, "high").count > 0
        assert not all(map(is_over, high))


@pytest.mark.parametrize("window", ["0.5s", "0.000001s"])
def test_a_job_that_outlives_its_completion_window_fails_and_says_so(
    redis_url: str, connection: Redis, window: str
) -> None:
    job = enqueue(connection, max_completion_tokens=5000, completion_window=window)
    with running_worker(redis_url, step_seconds=0.01):
        wait_for(lambda: is_over(job))
    assert status(job) == "failed"
    assert "did not finish within its completion_window" in events(connection, job.id)[-1].error


def test_a_job_with_time_left_in_its_completion_window_finishes(
    redis_url: str, connection: Redis
) -> None:
    job = enqueue(connection, completion_window="24h")
    with running_worker(redis_url):
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"
