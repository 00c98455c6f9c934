"""A worker of several models: one is loaded at a time, and the queues say which."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Event
from typing import Any

import pytest
from redis import Redis
from rq import Worker
from rq.job import Job
from rq.suspension import resume, suspend

from omlx_producer.client import workers
from omlx_producer.client.models import read_models
from omlx_producer.client.workers import read_workers
from omlx_producer.figures import ModelFigures, read_figures
from omlx_producer.wire import MODELS_KEY
from omlx_producer.wire.keys import PAUSED_KEY
from omlx_worker.control import served
from omlx_worker.control import worker as worker_module
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.mac.machine import Mac
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.turning import Loads, enqueue_for, turning_worker
from tests.helpers.waiting import later
from tests.helpers.workers import (
    events,
    fetch,
    is_over,
    status,
    streamed_text,
    wait_for,
    worker_process,
)


def text_of(job: Job) -> str:
    return str(job.latest_result().return_value["choices"][0]["text"])


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.2)


def test_jobs_of_all_models_end_and_each_model_is_loaded_once(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue_for(connection, model) for model in "abcabcabc"]
    loads = Loads()
    with turning_worker(redis_url, "abc", loads, burst=True):
        pass
    assert {status(job) for job in jobs} == {"finished"}
    assert sorted(loads.made) == ["a", "b", "c"], "a model goes on while it has work"
    assert loads.most_open == 1
    assert loads.engines == []
    assert loads.kept == 0, "its memory is free before the next model takes its own"


def test_a_model_is_loaded_once_no_prompt_is_being_prepared_for_the_one_before(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, prepare = Event(), Event(), FakeEngine.prepare

    def prepare_long(self: FakeEngine, request: Any, job_id: str) -> Any:
        if request.prompt == "long":
            begun.set()
            goes_on.wait(20)
        return prepare(self, request, job_id)

    monkeypatch.setattr(FakeEngine, "prepare", prepare_long)
    loads = Loads()
    with turning_worker(redis_url, "ab", loads, switch_after=0.5) as worker:
        long = enqueue_for(connection, "a", "long")
        wait_for(begun.is_set)
        other = enqueue_for(connection, "b", priority="high")
        wait_for(lambda: not len(worker.leases))
        thread = later(goes_on.set, 0.5)
        wait_for(lambda: is_over(other) and is_over(long))
        thread.join()
    assert loads.made == ["a", "b", "a"]
    assert loads.kept == 0, "a prompt that is being prepared holds its model"


def test_without_jobs_the_first_model_is_loaded(redis_url: str) -> None:
    loads = Loads()
    with turning_worker(redis_url, "ab", loads) as worker:
        wait_for(lambda: worker.loaded.admission)
        assert loads.made == ["a"]


def test_the_first_model_to_be_loaded_is_the_one_with_the_most_urgent_job(
    redis_url: str, connection: Redis
) -> None:
    enqueue_for(connection, "b", priority="bulk")
    urgent = enqueue_for(connection, "c", priority="high")
    loads = Loads()
    with turning_worker(redis_url, "abc", loads) as _:
        wait_for(lambda: is_over(urgent))
        assert loads.made[0] == "c"
        wait_for(lambda: loads.made[1:] == ["b"])


@pytest.mark.slow
def test_a_row_whose_model_gives_way_goes_on_from_its_stream(
    redis_url: str, connection: Redis
) -> None:
    alone = enqueue_for(connection, "a", max_completion_tokens=300)
    loads = Loads(step_seconds=0.001)
    with turning_worker(redis_url, "a", loads, burst=True):
        pass
    long = enqueue_for(connection, "a", max_completion_tokens=300)
    loads = Loads(step_seconds=0.1)
    # High ones wait 0.3 s.
    with turning_worker(redis_url, "ab", loads, switch_after=6.0) as worker:
        wait_for(lambda: events(connection, long.id))
        loads.engine["step_seconds"] = 0.001
        other = enqueue_for(connection, "b", priority="high")
        wait_for(lambda: is_over(other))
        assert not is_over(long)
        wait_for(lambda: is_over(long))
        assert worker.boards.counters["a"].tokens <= 300, "none is made twice"
    assert loads.made == ["a", "b", "a"]
    assert text_of(long) == text_of(alone) == streamed_text(connection, long.id)


@pytest.mark.slow
def test_a_busy_model_goes_on_until_jobs_of_others_have_waited_for_long(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads(step_seconds=0.01)
    with turning_worker(redis_url, "ab", loads) as worker:
        busy = enqueue_for(connection, "a", max_completion_tokens=100)
        wait_for(lambda: events(connection, busy.id))
        other = enqueue_for(connection, "b")
        wait_for(lambda: is_over(busy) and is_over(other))
        assert fetch(connection, busy.id).ended_at <= fetch(connection, other.id).started_at
        assert loads.made == ["a", "b"]
        assert worker.boards.counters["b"].switches == 1


def test_all_models_are_announced_and_their_figures_say_which_one_is_loaded(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads()
    loads.gate.clear()
    with turning_worker(redis_url, ["a", "b"], loads, name="mac-1") as worker:
        wait_for(lambda: connection.hlen(MODELS_KEY) == 2)
        [loading] = wait_for(lambda: read_workers(connection, "a"))
        assert (loading.state, loading.held_up) == ("loading", "loading it (reading the weights)")
        loads.gate.set()
        wait_for(lambda: worker.loaded.admission)
        job = enqueue_for(connection, "b")
        wait_for(lambda: is_over(job))
        [model_a, model_b] = wait_for(
            lambda: (found := read_figures(connection))[0].workers[0].turned_to == "b" and found,
        )
        assert list(read_models(connection, live=True)) == ["a", "b"]
        [note] = model_a.notes
        assert note.startswith("mac-1: serving b since ")
        assert model_a.held_up.startswith("the workers of a are serving b since ")
        assert (model_b.notes, model_b.held_up) == ([], "")
        wait_for(lambda: read_figures(connection)[1].depths)
        [turn] = read_figures(connection)[1].depths
        assert turn.startswith("mac-1: loaded since ")
        assert "1 load in place of others took " in turn
        assert Worker.all(connection)[0].queue_names() == [
            f"omlx:{model}:{level}" for model in "ab" for level in ("high", "default", "bulk")
        ]
    assert connection.keys("omlx:workers:*") == []
    assert {info.announced_at for info in read_models(connection).values()} == {0}


def test_a_model_that_cannot_be_loaded_fails_its_jobs_and_the_others_go_on(
    redis_url: str, connection: Redis
) -> None:
    sentence = "--model b: no checkpoint, for it has no config.json; give another"
    loads = Loads(faults={"b": ModelError(sentence)})
    bad = [enqueue_for(connection, "b", priority="high") for _ in range(150)]
    good = [enqueue_for(connection, "a") for _ in range(3)]
    with turning_worker(redis_url, "ab", loads):
        wait_for(lambda: all(map(is_over, [*bad, *good])))
        assert {status(job) for job in bad} == {"failed"}
        assert {job.latest_result().exc_string for job in bad} == {sentence}
        assert {status(job) for job in good} == {"finished"}


def test_a_model_is_loaded_again_for_the_next_job_though_no_other_had_one(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads(faults={"b": ModelError("--model b: no such directory")})
    with turning_worker(redis_url, "ab", loads) as worker:
        bad = enqueue_for(connection, "b")
        wait_for(lambda: is_over(bad) and not worker.loaded.fault)
        loads.faults.clear()
        good = enqueue_for(connection, "b")
        wait_for(lambda: is_over(good))
        assert (status(bad), status(good)) == ("failed", "finished")
        assert loads.made[-2:] == ["b", "b"]


def test_a_load_that_fails_counts_for_no_later_one(redis_url: str, connection: Redis) -> None:
    loads = Loads(faults={"b": ModelError("--model b: no such directory")})
    with turning_worker(redis_url, "ab", loads) as worker:
        wait_for(lambda: worker.loaded.admission)
        bad = enqueue_for(connection, "b")
        wait_for(lambda: is_over(bad) and not worker.loaded.fault)
        good = enqueue_for(connection, "a")
        wait_for(lambda: is_over(good))
        assert loads.made == ["a", "b", "a"]
        assert worker.boards.counters["a"].switches == 0, "it has replaced no loaded model"


def test_any_error_of_a_load_fails_the_jobs_of_its_model_alone(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads(faults={"b": FileNotFoundError(2, "No such file", "b/model.safetensors")})
    bad, good = enqueue_for(connection, "b"), enqueue_for(connection, "a")
    with caplog.at_level(logging.ERROR), turning_worker(redis_url, "ab", loads):
        wait_for(lambda: is_over(bad) and is_over(good))
    assert (status(bad), status(good)) == ("failed", "finished")
    assert "b/model.safetensors" in bad.latest_result().exc_string


def test_an_only_model_that_cannot_be_loaded_ends_the_worker(redis_url: str) -> None:
    loads = Loads(faults={"a": ModelError("no such model")})
    with (
        pytest.raises(ModelError, match="no such model"),
        turning_worker(redis_url, "a", loads, burst=True),
    ):
        pass


def test_a_paused_model_is_not_loaded(redis_url: str, connection: Redis) -> None:
    connection.sadd("omlx:paused", "b")
    job = enqueue_for(connection, "b")
    loads = Loads()
    with turning_worker(redis_url, "ab", loads):
        other = enqueue_for(connection, "a")
        wait_for(lambda: is_over(other))
        looks = wait_for(lambda: connection.info("commandstats")["cmdstat_smembers"]["calls"])
        wait_for(lambda: connection.info("commandstats")["cmdstat_smembers"]["calls"] > looks + 2)
        assert loads.made == ["a"]
        connection.srem("omlx:paused", "b")
        wait_for(lambda: is_over(job))


def test_a_worker_whose_model_was_forgotten_while_all_are_suspended_goes_on(
    redis_url: str, connection: Redis
) -> None:
    with turning_worker(redis_url, "ab", Loads()) as worker:
        wait_for(lambda: worker.loaded.admission and connection.hexists(MODELS_KEY, "a"))
        suspend(connection)
        wait_for(lambda: worker.loaded.is_paused)
        connection.hdel(MODELS_KEY, "a")
        looks = connection.info("commandstats")["cmdstat_smembers"]["calls"]
        wait_for(lambda: connection.info("commandstats")["cmdstat_smembers"]["calls"] > looks + 2)
        resume(connection)
        job = enqueue_for(connection, "b")
        wait_for(lambda: is_over(job))


def test_the_machine_is_kept_awake_while_a_model_is_loaded_for_jobs_that_wait(
    redis_url: str, connection: Redis
) -> None:
    told: list[bool] = []

    class Told(Mac):
        def keep_awake(self, busy: bool) -> None:
            told.append(busy)

    loads = Loads()
    with turning_worker(redis_url, "ab", loads, machine=Told()) as worker:
        wait_for(lambda: worker.loaded.admission and not told[-1])
        loads.gate.clear()
        job = enqueue_for(connection, "b")
        wait_for(lambda: loads.made == ["a", "b"])
        told.clear()
        wait_for(lambda: len(told) > 1)
        assert all(told)
        loads.gate.set()
        wait_for(lambda: is_over(job) and not told[-1])


def test_a_worker_that_is_told_to_end_while_it_loads_ends_in_order(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads()
    loads.gate.clear()
    job = enqueue_for(connection, "a")
    with turning_worker(redis_url, "ab", loads) as worker:
        wait_for(lambda: loads.made == ["a"])
        worker.stop()
        time.sleep(0.1)
        loads.gate.set()
        wait_for(lambda: not connection.keys("omlx:workers:*"))
        assert loads.engines == []
    assert status(job) == "queued"


@pytest.mark.slow
def test_jobs_that_a_dead_worker_left_for_a_model_that_is_not_loaded_are_put_back(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until then it counts as having its model.
    monkeypatch.setattr(workers, "SILENT_SECONDS", 2.0)
    job = enqueue_for(connection, "b", max_completion_tokens=200)
    with worker_process(redis_url, alias="b", step_seconds=0.02) as process:
        wait_for(lambda: events(connection, job.id))
        process.kill()
        process.wait(10)
    loads = Loads()
    with turning_worker(redis_url, "ab", loads, lease_seconds=1.0):
        wait_for(lambda: is_over(job))
    assert status(job) == "finished"
    assert loads.made == ["a", "b"]


@pytest.mark.slow
def test_of_two_idle_workers_that_look_together_one_loads_each_model(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Loads(), Loads()
    together, read = Barrier(2, timeout=20), read_figures

    def read_together(*given: Any) -> list[ModelFigures]:
        found = read(*given)
        if not any(each.paused for each in found):
            with suppress(BrokenBarrierError):
                together.wait()
                together.abort()
        return found

    with (
        turning_worker(redis_url, "abc", first) as one,
        turning_worker(redis_url, "abc", second) as other,
    ):
        wait_for(lambda: one.loaded.admission and other.loaded.admission)
        connection.sadd(PAUSED_KEY, "b", "c")
        jobs = [enqueue_for(connection, model, max_completion_tokens=20) for model in "bc"]
        monkeypatch.setattr(served, "read_figures", read_together)
        connection.delete(PAUSED_KEY)
        wait_for(lambda: all(map(is_over, jobs)))
        assert together.broken
    assert sorted(first.made[1:] + second.made[1:]) == ["b", "c"]


def test_an_idle_worker_leaves_jobs_to_a_worker_that_has_their_model(
    redis_url: str, connection: Redis
) -> None:
    here, there = Loads(), Loads(step_seconds=0.005)
    with (
        turning_worker(redis_url, "ba", there, max_batch=1) as owner,
        turning_worker(redis_url, "ab", here) as idle,
    ):
        wait_for(lambda: owner.loaded.admission and idle.loaded.admission)
        jobs = [enqueue_for(connection, "b", max_completion_tokens=20) for _ in range(20)]
        wait_for(lambda: all(map(is_over, jobs)))
        assert (here.made, there.made) == (["a"], ["b"])
