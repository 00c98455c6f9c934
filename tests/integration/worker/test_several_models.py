"""A worker of several models: one is loaded at a time, and the queues say which."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
from redis import Redis
from rq import Worker
from rq.job import Job
from rq.suspension import resume, suspend

from omlx_producer.client import workers
from omlx_producer.client.models import read_models
from omlx_producer.client.workers import WorkerFigures, read_workers
from omlx_producer.figures import ModelFigures, read_figures
from omlx_producer.operate import drain_worker
from omlx_producer.wire import MODELS_KEY, WIRE_FIELD, WIRE_VERSION
from omlx_producer.wire.keys import PAUSED_KEY
from omlx_worker.at_home import worker_here
from omlx_worker.control import in_turn, served, whose_turn
from omlx_worker.control import status as status_board
from omlx_worker.control import worker as worker_module
from omlx_worker.decode.thread import MAX_ENGINE_FAILURES
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.mac.machine import Mac
from tests.helpers.fake_engine import BREAKS_STEP
from tests.helpers.fake_worker import sign_on
from tests.helpers.turning import Loads, enqueue_for, loading_worker, turning_worker
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
    monkeypatch.setattr(in_turn, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(in_turn, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(in_turn, "DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(served, "FIRST_PAUSE", 0.3)
    monkeypatch.setattr(status_board, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.2)


def serving(connection: Redis, model: str) -> list[WorkerFigures]:
    """The workers that have loaded a model and take its jobs."""
    return [w for w in read_workers(connection, model) if w.takes_jobs and not w.is_loading]


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


def test_without_jobs_the_first_model_is_loaded(redis_url: str, connection: Redis) -> None:
    loads = Loads()
    with turning_worker(redis_url, "ab", loads):
        wait_for(lambda: serving(connection, "a"))
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
        told = [each.worker.decode_thread.counters for each in worker.test_processes]
        assert told[0].tokens + told[2].tokens <= 300, "none is made twice"
    assert loads.made == ["a", "b", "a"]
    assert text_of(long) == text_of(alone) == streamed_text(connection, long.id)


@pytest.mark.slow
def test_a_busy_model_goes_on_until_jobs_of_others_have_waited_for_long(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads(step_seconds=0.01)
    with turning_worker(redis_url, "ab", loads):
        busy = enqueue_for(connection, "a", max_completion_tokens=100)
        wait_for(lambda: events(connection, busy.id))
        other = enqueue_for(connection, "b")
        wait_for(lambda: is_over(busy) and is_over(other))
        assert fetch(connection, busy.id).ended_at <= fetch(connection, other.id).started_at
        assert loads.made == ["a", "b"]
        [figures] = wait_for(lambda: serving(connection, "b"))
        assert figures.switches == 1


def test_all_models_are_announced_and_their_figures_say_which_one_is_loaded(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads()
    loads.gate.clear()
    with turning_worker(redis_url, ["a", "b"], loads, name="mac-1"):
        wait_for(lambda: connection.hlen(MODELS_KEY) == 2)
        [loading] = wait_for(
            lambda: [each for each in read_workers(connection, "a") if each.progress]
        )
        assert (loading.state, loading.held_up) == ("loading", "loading it (reading the weights)")
        loads.gate.set()
        wait_for(lambda: serving(connection, "a"))
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


def test_jobs_of_a_model_that_cannot_be_loaded_wait_and_the_others_go_on(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "FIRST_PAUSE", 600.0)
    sentence = "--model b: no checkpoint, for it has no config.json; give another"
    loads = Loads(faults={"b": ModelError(sentence)})
    waiting = [enqueue_for(connection, "b", priority="high") for _ in range(3)]
    good = [enqueue_for(connection, "a") for _ in range(3)]
    with turning_worker(redis_url, "ab", loads, name="mac-1"):
        wait_for(lambda: all(map(is_over, good)))
        [_, model] = wait_for(lambda: (found := read_figures(connection))[1].held_up and found)
        assert model.held_up.startswith("the workers of b are unable to serve it until ")
        assert model.held_up.endswith(f": {sentence}")
        assert f"mac-1: {model.workers[0].held_up}" in model.notes
    assert loads.made == ["b", "a"]
    assert {status(job) for job in good} == {"finished"}
    assert {status(job) for job in waiting} == {"queued"}


@pytest.mark.parametrize("fault", ["", "--model b: no such directory"])
def test_a_command_of_this_machine_uses_no_worker_that_cannot_serve_the_model(
    connection: Redis, fault: str
) -> None:
    here = {"host": socket.gethostname(), "state": "not loaded", "fault": fault}
    sign_on(connection, "mac-1", "b", **here)
    connection.hset("rq:worker:mac-1", "pid", os.getppid())
    assert (worker_here(connection, "b") is None) == bool(fault)


def test_a_worker_with_a_broken_copy_leaves_the_jobs_to_a_good_one(
    redis_url: str, connection: Redis
) -> None:
    jobs = [enqueue_for(connection, "b", priority="bulk") for _ in range(150)]
    broken = Loads(faults={"b": ModelError("--model b: no such directory")})
    with turning_worker(redis_url, "ba", broken):
        wait_for(lambda: broken.made)
        with turning_worker(redis_url, "ab", Loads()):
            wait_for(lambda: all(map(is_over, jobs)))
    assert {status(job) for job in jobs} == {"finished"}


def test_a_model_that_could_not_be_loaded_is_tried_again_later_and_later(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads(faults={"b": ModelError("--model b: no such directory")})
    job = enqueue_for(connection, "b")
    told = "b is not served: --model b: no such directory; the next try is in"
    with caplog.at_level(logging.ERROR), turning_worker(redis_url, "ab", loads):
        wait_for(lambda: f"{told} 0.6 s" in caplog.messages)
        loads.faults.clear()
        wait_for(lambda: is_over(job))
        [figures] = wait_for(lambda: serving(connection, "b"))
        assert figures.held_up == ""
    assert [each for each in caplog.messages if told in each] == [f"{told} 0.3 s", f"{told} 0.6 s"]
    assert status(job) == "finished"


def test_a_load_that_fails_counts_for_no_later_one(redis_url: str, connection: Redis) -> None:
    loads = Loads(faults={"b": ModelError("--model b: no such directory")})
    with turning_worker(redis_url, "ab", loads):
        wait_for(lambda: serving(connection, "a"))
        enqueue_for(connection, "b")
        wait_for(lambda: loads.made[:3] == ["a", "b", "a"])
        [figures] = wait_for(lambda: serving(connection, "a"))
        assert figures.switches == 0, "it has replaced no loaded model"


def test_an_engine_that_breaks_ends_its_process_alone(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads()
    with caplog.at_level(logging.ERROR), turning_worker(redis_url, "ab", loads):
        for _ in range(MAX_ENGINE_FAILURES):
            broken = enqueue_for(connection, "a", BREAKS_STEP)
            wait_for(lambda job=broken: is_over(job))
        good = [enqueue_for(connection, model) for model in "ab"]
        wait_for(lambda: all(map(is_over, good)))
    assert {status(job) for job in good} == {"finished"}
    [told] = [each for each in caplog.messages if each.startswith("a is not served: ")]
    assert "the engine failed" in told


def test_an_only_model_that_cannot_be_loaded_ends_the_worker(redis_url: str) -> None:
    loads = Loads(faults={"demo": ModelError("no such model")})
    with pytest.raises(ModelError, match="no such model"), loading_worker(redis_url, loads) as one:
        wait_for(lambda: not one.test_thread.is_alive())


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
    with turning_worker(redis_url, "ab", Loads()):
        wait_for(lambda: serving(connection, "a") and connection.hexists(MODELS_KEY, "a"))
        suspend(connection)
        wait_for(lambda: read_workers(connection, "a")[0].state == "paused")
        connection.hdel(MODELS_KEY, "a")
        looks = connection.info("commandstats")["cmdstat_exists"]["calls"]
        wait_for(lambda: connection.info("commandstats")["cmdstat_exists"]["calls"] > looks + 9)
        resume(connection)
        job = enqueue_for(connection, "b")
        wait_for(lambda: is_over(job))


def test_the_machine_is_kept_awake_while_a_model_is_loaded(
    redis_url: str, connection: Redis
) -> None:
    told: list[bool] = []

    class Told(Mac):
        def keep_awake(self, busy: bool) -> None:
            told.append(busy)

    loads = Loads()
    loads.gate.clear()
    with loading_worker(redis_url, loads, machine=Told()):
        wait_for(lambda: loads.made)
        told.clear()
        wait_for(lambda: len(told) > 1)
        assert all(told)
        loads.gate.set()
        wait_for(lambda: serving(connection, "demo") and not told[-1])


def test_a_worker_that_is_told_to_end_while_it_loads_ends_at_once(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads()
    loads.gate.clear()
    job = enqueue_for(connection, "a")
    with turning_worker(redis_url, "ab", loads) as worker:
        wait_for(lambda: loads.made == ["a"])
        worker.stop()
        wait_for(lambda: not worker.test_thread.is_alive())
        assert worker.exit_code == 143
        assert not connection.keys("omlx:workers:*")
        loads.gate.set()
    assert status(job) == "queued"


def test_a_worker_that_is_told_to_drain_finishes_its_rows_and_says_so_for_all_models(
    redis_url: str, connection: Redis
) -> None:
    loads = Loads(step_seconds=0.03)
    with turning_worker(redis_url, "ab", loads, name="mac-1") as worker:
        job = enqueue_for(connection, "a", max_completion_tokens=100)
        wait_for(lambda: events(connection, job.id))
        other = enqueue_for(connection, "b")
        assert drain_worker(connection, "mac-1")
        wait_for(
            lambda: {w.state for m in "ab" for w in read_workers(connection, m)} == {"draining"}
        )
        wait_for(lambda: not worker.test_thread.is_alive())
        assert worker.exit_code == 0
    assert (status(job), status(other)) == ("finished", "queued")
    assert loads.made == ["a"]


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
        turning_worker(redis_url, "abc", first),
        turning_worker(redis_url, "abc", second),
    ):
        wait_for(lambda: len(serving(connection, "a")) == 2)
        connection.sadd(PAUSED_KEY, "b", "c")
        jobs = [enqueue_for(connection, model, max_completion_tokens=20) for model in "bc"]
        monkeypatch.setattr(whose_turn, "read_figures", read_together)
        connection.delete(PAUSED_KEY)
        wait_for(lambda: all(map(is_over, jobs)))
        assert together.broken
    assert sorted(first.made[1:] + second.made[1:]) == ["b", "c"]


def test_an_idle_worker_leaves_jobs_to_a_worker_that_has_their_model(
    redis_url: str, connection: Redis
) -> None:
    here, there = Loads(), Loads(step_seconds=0.005)
    with (
        turning_worker(redis_url, "ba", there, max_batch=1),
        turning_worker(redis_url, "ab", here),
    ):
        wait_for(lambda: serving(connection, "a") and serving(connection, "b"))
        jobs = [enqueue_for(connection, "b", max_completion_tokens=20) for _ in range(20)]
        wait_for(lambda: all(map(is_over, jobs)))
        assert (here.made, there.made) == (["a"], ["b"])


@pytest.mark.parametrize("state", ["draining", "paused"])
def test_a_model_that_others_have_and_do_not_serve_is_loaded_here(
    redis_url: str, connection: Redis, state: str
) -> None:
    with turning_worker(redis_url, "ab", Loads()):
        wait_for(lambda: serving(connection, "a"))
        sign_on(connection, "other", "b", state=state)
        busy = enqueue_for(connection, "a", max_completion_tokens=2)
        job = enqueue_for(connection, "b")
        wait_for(lambda: is_over(job) and is_over(busy), 10)


def test_a_job_of_a_newer_version_loads_no_model_and_holds_up_no_other(
    redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    loads = Loads()
    with turning_worker(redis_url, "abc", loads):
        wait_for(lambda: serving(connection, "a"))
        for model in "ab":
            newer = enqueue_for(connection, model)
            connection.hset(newer.key, WIRE_FIELD, WIRE_VERSION + 1)
        for model in "cac":
            job = enqueue_for(connection, model)
            wait_for(lambda job=job: is_over(job))
        assert status(newer) == "queued"
        known = enqueue_for(connection, "b")
        wait_for(lambda: is_over(known))
    assert loads.made == ["a", "c", "a", "c", "b"]
    told = f"job or batch {newer.id} has fields of a newer version of omlx-queue"
    assert any(each.startswith(told) for each in caplog.messages)
