"""The decode thread by itself: what it tells the traffic thread, without any Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from pydantic import ByteSize

from omlx_producer.wire import End, GenerationRequest, InvalidRequest
from omlx_worker.decode import thread
from omlx_worker.decode.thread import DecodeThread, EngineBroken
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import Tell
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.job import ActiveJob
from omlx_worker.messages import (
    Admit,
    Crashed,
    Drain,
    Drop,
    GivenBack,
    Lost,
    Stepped,
    Stop,
)
from omlx_worker.queue.claim import Claim
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import BREAKS_LOOK, BREAKS_READ, BREAKS_STEP, FakeEngine, expected


class Bench:
    """A decode thread and its mailboxes."""

    def __init__(self, **engine: Any) -> None:
        self.engine = FakeEngine(**engine)
        self.traffic: SimpleQueue[Any] = SimpleQueue()
        self.main: SimpleQueue[Any] = SimpleQueue()
        self.decode_thread = DecodeThread(
            WorkerSettings(model="demo"), lambda _: self.engine, self.traffic, self.main
        )
        self.jobs: dict[str, ActiveJob] = {}

    def admit(
        self,
        job_id: str,
        prompt: str = "hello",
        queue: str = "default",
        pictures: tuple[Picture, ...] = (),
        **fields: Any,
    ) -> ActiveJob:
        request = GenerationRequest(model="m", prompt=prompt, seed=1, **fields)
        claim = Claim(job_id, "omlx-1", f"omlx:m:{queue}", 0.0, 0, b"", None, False)
        rows = [replace(row, pictures=pictures) for row in self.engine.prepare(request, job_id)]
        job = self.jobs[job_id] = ActiveJob(claim, request, rows, streams=True)
        self.decode_thread.submit(Admit([job]))
        return job

    def read(self) -> Any:
        return self.traffic.get(timeout=5)

    def until(self, kind: type, job_id: str | None = None) -> Any:
        """Read on to a message of a kind, folding emissions into their jobs."""
        while True:
            message = self.read()
            if isinstance(message, Stepped):
                for emission in message.emissions:
                    self.jobs[emission.row_id.partition(":")[0]].feed(emission)
            if isinstance(message, kind) and job_id in (
                None,
                getattr(message, "claim", None) and message.claim.id,
            ):
                return message

    def run_out(self) -> list[Any]:
        self.decode_thread.submit(Stop())
        messages = []
        while not isinstance(message := self.read(), Stop):
            messages.append(message)
        assert self.decode_thread.join(5)
        return messages


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "LONGEST_CHUNK", 8)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(step_seconds=0.002)
    made.decode_thread.start()
    yield made
    made.decode_thread.submit(Stop())
    assert made.decode_thread.join(5)


def test_a_job_is_announced_before_anything_about_it(bench: Bench) -> None:
    job = bench.admit("a")
    assert bench.read() == Admit([job])
    assert isinstance(bench.read(), Stepped)


def test_rows_that_join_and_leave_at_different_times_come_out_whole(bench: Bench) -> None:
    jobs = [
        bench.admit(f"j{i}", prompt="p" * (1 + 7 * i), max_completion_tokens=5 + i)
        for i in range(8)
    ]
    while not all(job.finished for job in jobs):
        bench.until(Stepped)
    for job in jobs:
        assert (job.rows[0].text_tokens(), job.choices[0].text) == expected(job.rows[0].request)
    assert bench.decode_thread.counters.tokens == sum(job.tokens for job in jobs)
    assert 1 < bench.decode_thread.counters.mean_batch <= 8


def test_a_model_that_does_not_load_is_reported_to_the_caller() -> None:
    def fail(_: Tell) -> FakeEngine:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        DecodeThread(
            WorkerSettings(model="demo"), fail, SimpleQueue(), SimpleQueue()
        ).start().result()


@pytest.mark.parametrize(("limit", "kept"), [(None, 1 << 30), (5 << 30, 5 << 30)])
def test_the_engine_is_kept_within_the_budget_that_jobs_are_let_in_by(
    limit: int | None, kept: int
) -> None:
    engine = FakeEngine()
    settings = WorkerSettings(model="demo", memory_limit=limit and ByteSize(limit))
    decode_thread = DecodeThread(settings, lambda _: engine, SimpleQueue(), SimpleQueue())

    decode_thread.start().result()
    decode_thread.submit(Stop())

    assert decode_thread.join(5)
    assert engine.kept_within == decode_thread.budget.limit == kept


def test_a_job_of_which_a_row_has_an_error_fails_with_its_sentence_and_others_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = bench.engine.step
    error = InvalidRequest("tools", "the constraint takes too long to follow")

    def with_an_error(depths: Any = None) -> list[Emission]:
        return [
            replace(each, error=error, finish_reason="length")
            if (each.row_id, each.finish_reason) == ("a:1", None)
            else each
            for each in step(depths)
        ]

    monkeypatch.setattr(bench.engine, "step", with_an_error)
    bench.admit("a", n=2, max_completion_tokens=500)
    other = bench.admit("b", max_completion_tokens=20)

    drop = bench.until(Drop)
    assert (drop.claim.id, drop.reason) == ("a", End.refusing(error))
    while not other.finished:
        bench.until(Stepped)
    assert "a:0" not in {row.row_id for row in bench.engine.states}


def test_a_cancelled_job_says_nothing_more(bench: Bench) -> None:
    job = bench.admit("a", max_completion_tokens=5000)
    other = bench.admit("b", max_completion_tokens=5000)
    bench.until(Stepped)
    bench.decode_thread.submit(Drop(job.claim, End("cancelled", "enough")))
    assert bench.until(Drop) == Drop(job.claim, End("cancelled", "enough"))
    for _ in range(5):
        message = bench.read()
        assert {emission.row_id for emission in message.emissions} == {other.rows[0].row_id}
    assert set(bench.engine.states) == set(other.rows)


def test_cancelling_a_job_of_an_earlier_claim_does_nothing(bench: Bench) -> None:
    job = bench.admit("a", max_completion_tokens=30)
    earlier = Claim("a", "omlx-0", "omlx:m:default", 0.0, 0, b"", None, False)
    bench.decode_thread.submit(Drop(earlier, Lost()))
    while not job.finished:
        assert not isinstance(bench.until(Stepped), Drop)


def test_a_job_claimed_again_replaces_its_earlier_run(bench: Bench) -> None:
    first = bench.admit("a", max_completion_tokens=5000)
    bench.until(Stepped)
    second = bench.admit("a", max_completion_tokens=5)
    assert bench.until(Drop) == Drop(first.claim, Lost())
    assert bench.read() == Admit([second])
    while not second.finished:
        bench.until(Stepped)


def test_draining_finishes_what_has_started_and_gives_back_the_rest() -> None:
    bench = Bench(max_rows=2, step_seconds=0.002)
    bench.decode_thread.start()
    jobs = [bench.admit(f"j{i}", max_completion_tokens=20) for i in range(4)]
    bench.until(Stepped)
    bench.until(Stepped)
    bench.decode_thread.submit(Drain())
    given_back = [bench.until(Drop), bench.until(Drop)]
    assert given_back == [Drop(job.claim, GivenBack()) for job in jobs[2:]]
    while not (jobs[0].finished and jobs[1].finished):
        bench.until(Stepped)
    assert bench.run_out() == []


def test_stopping_leaves_what_becomes_of_the_jobs_to_the_main_thread() -> None:
    bench = Bench(max_rows=2, step_seconds=0.002)
    bench.decode_thread.start()
    for number in range(4):
        bench.admit(f"j{number}", max_completion_tokens=5000)
    bench.until(Stepped)
    assert not any(isinstance(message, Drop) for message in bench.run_out())
    assert bench.engine.states == {}


def test_higher_queues_go_first() -> None:
    bench = Bench(max_rows=1)
    jobs = [bench.admit("b", queue="bulk"), bench.admit("d"), bench.admit("h", queue="high")]
    bench.decode_thread.start()
    order: list[str] = []
    while not all(job.finished for job in jobs):
        emissions = bench.until(Stepped).emissions
        order += [emission.row_id for emission in emissions if emission.finish_reason]
    assert order == ["h:0", "d:0", "b:0"]
    bench.run_out()


def test_an_error_on_a_prompt_fails_that_job_alone(bench: Bench) -> None:
    good = bench.admit("good", max_completion_tokens=40)
    bad = bench.admit("bad", prompt=BREAKS_READ)
    ended = bench.until(Drop)
    assert ended.claim is bad.claim
    assert ended.reason == End(
        "failed", "the engine failed on this job: RuntimeError: out of memory"
    )
    while not good.finished:
        bench.until(Stepped)
    assert bench.engine.states == {}


def test_a_picture_that_cannot_be_looked_at_fails_its_job_alone(bench: Bench) -> None:
    good = bench.admit("good", pictures=(Picture(1, 1, 1, b"good"),), max_completion_tokens=40)
    bench.admit("bad", pictures=(Picture(1, 1, 1, BREAKS_LOOK),))
    ended = bench.until(Drop)
    sentence = "the engine failed on this job: ValueError: the picture cannot be decoded"
    assert (ended.claim.id, ended.reason) == ("bad", End("failed", sentence))
    while not good.finished:
        bench.until(Stepped)
    assert bench.engine.states == {}


def test_an_error_in_a_step_fails_the_rows_in_it_and_no_others() -> None:
    bench = Bench(max_rows=2)
    hit, bad, waiting = (
        bench.admit("hit", "a" * 20),
        bench.admit("bad", BREAKS_STEP),
        bench.admit("w"),
    )
    bench.decode_thread.start()
    assert {bench.until(Drop).claim.id, bench.until(Drop).claim.id} == {"hit", "bad"}
    while not waiting.finished:
        bench.until(Stepped)
    assert hit.claim.id == "hit"
    assert bad.claim.id == "bad"
    bench.run_out()


def test_an_engine_that_fails_again_and_again_is_given_up() -> None:
    bench = Bench(max_rows=1)
    for number in range(5):
        bench.admit(f"j{number}", BREAKS_STEP)
    bench.decode_thread.start()
    assert [bench.until(Drop).reason.code for _ in range(3)] == ["failed"] * 3
    assert isinstance(bench.main.get(timeout=5), Crashed)
    assert isinstance(bench.read(), Stop)
    assert bench.decode_thread.join(5)


def test_the_engine_is_given_up_with_the_reason() -> None:
    bench = Bench(max_rows=1)
    for number in range(3):
        bench.admit(f"j{number}", BREAKS_STEP)
    bench.decode_thread.start()
    error = bench.main.get(timeout=5).error
    assert isinstance(error, EngineBroken)
    assert "the device was lost" in str(error)


def test_an_idle_thread_warms_up_and_leaves_off_when_a_job_comes() -> None:
    class Cold(FakeEngine):
        first, pieces = 3, 0

        def warm_up(self, *, first: bool = False) -> bool:
            assert not self.states, "rows wait"
            if first:
                told.append(bench.decode_thread.progress)
            self.pieces += 1
            return not first or self.pieces < self.first

    told: list[str] = []
    bench = Bench()
    bench.engine = engine = Cold()
    engine.first_parts = 3
    bench.decode_thread.start().result()
    assert told == [f"warming up {part} of 3" for part in (1, 2, 3)]
    assert engine.pieces >= 3, "what the first job needs"
    bench.admit("a", max_completion_tokens=5)
    bench.until(Stepped)
    bench.run_out()
