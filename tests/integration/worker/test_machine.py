"""A worker whose machine is on battery, short of memory, or about to sleep."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rich.console import Console

from omlx_producer.cli.overview import draw_figures
from omlx_producer.figures import read_figures
from omlx_worker import build
from omlx_worker.control.worker import GenerationWorker
from omlx_worker.engine.ragged.footprint import allocated
from omlx_worker.mac.machine import Mac
from omlx_worker.mac.system import System
from omlx_worker.settings import WorkerSettings
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.fake_mac import FakeMac, compile_library
from tests.helpers.workers import (
    ALIAS,
    enqueue,
    events,
    is_over,
    loads,
    run_burst,
    running_worker,
    started,
    status,
    wait_for,
)


@pytest.mark.slow
def test_a_worker_on_battery_finishes_its_jobs_and_takes_others_when_power_is_back(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_worker.control.status.WRITE_SECONDS", 0.05)
    rows = 16

    class OnBattery(Mac):
        def most_rows(self, _: int) -> int:
            return rows

    machine = OnBattery(None)

    def state() -> str:
        [worker] = read_figures(connection)[0].workers
        return worker.state

    with running_worker(redis_url, step_seconds=0.01, machine=machine, name="mac-1"):
        first = enqueue(connection, max_completion_tokens=60)
        wait_for(lambda: len(events(connection, first.id)) > 2)
        rows = 0
        wait_for(lambda: state() == "on battery")
        second = enqueue(connection, priority="high")
        wait_for(lambda: is_over(first))
        assert (status(first), status(second)) == ("finished", "queued")
        console = Console(width=100, record=True)
        console.print(draw_figures(read_figures(connection)))
        assert "mac-1: on battery (--only-on-power)" in console.export_text()
        rows = 16
        wait_for(lambda: is_over(second))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_worker_of_the_command_minds_the_mac_as_its_settings_say(
    connection: Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mac, engine = FakeMac(compile_library(tmp_path)), FakeEngine()
    monkeypatch.setattr(build, "this_system", lambda: System(mac.load))
    loads(monkeypatch, lambda *_: engine)

    def serve(**options: Any) -> GenerationWorker:
        worker = build.make_worker([WorkerSettings(model_alias=ALIAS, **options)], connection)
        worker.work(burst=True)
        return worker

    job = enqueue(connection)
    mac["remaining"] = -1.0
    serve(only_on_power=True)
    assert status(job) == "queued"
    serve(allow_sleep=True)
    assert (status(job), mac["asserted"]) == ("finished", 0)
    enqueue(connection)
    budget = serve().decode_thread.budget
    assert (mac["asserted"], mac["released"]) == (1, 1)
    assert budget.room([]) == budget.limit
    mac["footprint"] = allocated() + 5
    assert budget.room([]) == budget.limit - 5


def test_a_worker_that_is_short_of_memory_holds_fewer_rows(
    redis_url: str, connection: Redis
) -> None:
    for _ in range(8):
        enqueue(connection)

    class ShortOfMemory(Mac):
        def most_rows(self, rows: int) -> int:
            return rows // 2

    engine = run_burst(redis_url, max_rows=4, machine=ShortOfMemory(None))
    assert engine.most_rows == 2


@pytest.mark.slow
def test_the_machine_is_kept_awake_while_jobs_run(redis_url: str, connection: Redis) -> None:
    told: list[bool] = []

    class Told(Mac):
        def keep_awake(self, busy: bool) -> None:
            told.append(busy)

    with running_worker(redis_url, step_seconds=0.01, machine=Told(None)):
        wait_for(lambda: told)
        assert not any(told)
        job = enqueue(connection, max_completion_tokens=30)
        wait_for(lambda: told[-1])
        wait_for(lambda: is_over(job) and not told[-1])
        enqueue(connection, max_completion_tokens=9_000)
        wait_for(lambda: started(connection) and told[-1])
    assert not told[-1], "and not once the worker has ended"
