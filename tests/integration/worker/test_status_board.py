"""What a worker tells of itself."""

from __future__ import annotations

import logging

import pytest
from redis import Redis
from rich.console import Console

from omlx_producer.cli.overview import draw_figures
from omlx_producer.client.models import read_models
from omlx_producer.client.workers import (
    GONE_SECONDS,
    SILENT_SECONDS,
    WorkerFigures,
    read_rates,
    read_workers,
    workers_key,
    write_figures,
)
from omlx_producer.connection import server_time
from omlx_producer.figures import read_figures
from omlx_producer.wire import MODELS_KEY, FinishReason, GenerationRequest, ModelInfo
from omlx_worker.control.status import StatusBoard, sign_off
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.delivery.job_log import JobCounts
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.job import ActiveJob
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.lease import LeaseTable
from tests.helpers.clock import Clock
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.workers import ALIAS, enqueue, is_over, running_worker, wait_for

INFO = ModelInfo(model="fake", context_length=100, longest_token=1, system_fingerprint="fp_1")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def board(connection: Redis, clock: Clock, counters: Counters) -> StatusBoard:
    return StatusBoard(
        connection,
        ALIAS,
        "mac-1",
        "auto",
        INFO,
        counters=counters,
        jobs=JobCounts(),
        leases=LeaseTable(connection, "mac-1", ["q"]),
        budget=MemoryBudget(8 * 2**30, 2**30, lambda sizes: 2**20 * len(sizes)),
        driver=DepthDriver(FixedPolicy(0)),
        machine_memory=20 * 2**30,
        clock=clock,
    )


def told(board: StatusBoard) -> WorkerFigures:
    """The figures of the board in Redis."""
    board._written_at = float("-inf")
    board.show("busy")
    return next(each for each in read_workers(board._connection, ALIAS) if each.name == "mac-1")


def test_bulk_rows_that_run_or_wait_are_counted_while_more_may_run(
    board: StatusBoard, counters: Counters
) -> None:
    size, counters.rows = board._driver.batch_size, 40
    size.limit_to(128)
    enqueue(board._connection)
    for _ in range(30):
        enqueue(board._connection, priority="bulk")
    told(board)
    assert size.held == 0

    size.step(40, hurried=False)
    told(board)
    size.step(40, hurried=False)

    assert (size.held, size.rows) == (70, 64)


def test_rates_are_those_since_the_last_look(
    board: StatusBoard, clock: Clock, counters: Counters
) -> None:
    board.show("busy")
    for _ in range(10):
        counters.stepped(1, [Emission("r", [1, 2, 3], "", drafted=3, accepted=2)])
    counters.prompt_tokens += 500
    clock.now += 2.5
    board.show("busy")
    [figures] = read_workers(board._connection, ALIAS)
    assert (figures.tokens_per_second, figures.prompt_tokens_per_second) == (12.0, 200.0)
    assert figures.acceptance == pytest.approx(2 / 3)
    assert (figures.name, figures.state, figures.uptime) == ("mac-1", "busy", 2.5)
    clock.now += 2.5
    board.show("idle")
    [figures] = read_workers(board._connection, ALIAS)
    assert (figures.tokens_per_second, figures.acceptance) == (0.0, None)
    assert [rate for _, rate in read_rates(board._connection, ALIAS)] == [0.0, 12.0, 0.0]


def test_rates_last_while_a_step_does(
    board: StatusBoard, clock: Clock, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with a new shape may take longer than the time between two looks."""

    def rate(seconds: float, tokens: int) -> float:
        counters.tokens += tokens
        clock.now += seconds
        return told(board).tokens_per_second

    monkeypatch.setattr(LeaseTable, "__len__", lambda _: 1)
    assert rate(2.0, 20) == 10.0
    assert [rate(2.0, 0), rate(2.0, 0)] == [10.0, 10.0]
    assert rate(2.0, 30) == 5.0, "30 tokens in 6 seconds"
    assert [rate(6.0, 0), rate(6.0, 0)] == [5.0, 0.0], "the engine is stuck"


def test_the_cached_share_is_that_of_the_latest_prompts(
    board: StatusBoard, clock: Clock, counters: Counters
) -> None:
    def shown(read: int, cached: int) -> float | None:
        counters.prompt_tokens += read
        counters.cached_tokens += cached
        clock.now += 2.5
        board.show("busy")
        [figures] = read_workers(board._connection, ALIAS)
        return figures.cached

    assert shown(0, 0) is None
    assert shown(100, 300) == 0.75
    assert shown(0, 0) == 0.75, "nothing was read meanwhile"
    assert shown(50, 50) == 0.5
    assert shown(10, 0) == 0.0
    assert shown(0, 30) == 1.0, "the rest of its prompt is yet to be read"


def finish(board: StatusBoard, *jobs: list[FinishReason]) -> None:
    """Jobs end, each with these finish reasons of its choices."""
    for reasons in jobs:
        claim = Claim("j", "omlx-1", f"omlx:{ALIAS}:bulk", 0.0, 0, b"", None)
        request = GenerationRequest(model=ALIAS, prompt="x", n=len(reasons))
        job = ActiveJob(claim, request, FakeEngine().prepare(request, "j"), streams=False)
        for choice, reason in enumerate(reasons):
            job.feed(Emission(f"j:{choice}", [1], "a", finish_reason=reason))
        board._jobs.ended(claim, job, "finished", "")


def test_the_log_tells_the_cached_share(
    board: StatusBoard, clock: Clock, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counters.rows, counters.prompt_tokens, counters.cached_tokens = 3, 62, 38
    clock.now += 11
    board.show("busy")
    [record] = caplog.records
    assert "depth 0, 38% of prompts cached, 0 tokens/s" in record.message


def test_the_log_gets_a_line_every_ten_seconds_while_there_is_work(
    board: StatusBoard, clock: Clock, counters: Counters, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    counters.rows = 3
    finish(board, *[["stop"]] * 7)
    for _ in range(20):
        board.show("busy")
        clock.now += 1
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1
    assert lines[0] == (
        "7 jobs finished, 3 rows, 0 waiting, auto, depth 0, 0 tokens/s, caches 0 B of 7.0 GiB"
    )
    counters.rows = 0
    finish(board, ["stop"])
    for _ in range(20):
        board.show("idle")
        clock.now += 1
    assert [record.message[:22] for record in caplog.records[1:]] == ["1 job finished, 0 rows"]


def test_the_log_counts_texts_that_were_cut_by_length(
    board: StatusBoard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for reasons, cut in ((["length", "stop"], ", 1 text cut by length"), (["stop"], "")):
        finish(board, reasons)
        clock.now += 11
        board.show("busy")
        assert f"1 job finished{cut}, 0 rows" in caplog.records[-1].message


def test_a_worker_that_was_killed_is_forgotten_after_its_lease_and_a_minute(
    board: StatusBoard, clock: Clock
) -> None:
    connection = board._connection
    old = told(board)
    assert old.lease_seconds == 30
    forgotten = old.at - 30 - GONE_SECONDS
    for name, at in {"dead": old.at - 20, "late": forgotten + 5, "gone": forgotten - 1}.items():
        write_figures(connection, ALIAS, old.model_copy(update={"name": name, "at": at}))
    assert [worker.name for worker in read_workers(connection, ALIAS)] == ["mac-1"]
    clock.now += 31
    board.announce()
    assert set(connection.hkeys(workers_key(ALIAS))) == {b"mac-1", b"dead", b"late"}
    sign_off(connection, ALIAS, "mac-1", INFO)
    assert read_workers(connection, ALIAS) == []


def test_the_last_worker_of_a_model_says_that_it_is_no_longer_served(board: StatusBoard) -> None:
    connection = board._connection
    board.announce()
    other = told(board).model_copy(update={"name": "mac-2"})
    write_figures(connection, ALIAS, other)
    sign_off(connection, ALIAS, "mac-1", INFO)
    assert read_models(connection)[ALIAS].announced_at > 0
    connection.hdel(workers_key(ALIAS), "mac-2")
    sign_off(connection, ALIAS, "mac-1", INFO)
    assert read_models(connection)[ALIAS].announced_at == 0


def announce_often(board: StatusBoard, clock: Clock) -> None:
    for _ in range(3):
        clock.now += 301
        told(board)
        board.announce()


def test_two_models_under_one_alias_are_told_once_and_shown(
    board: StatusBoard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    connection = board._connection
    other = told(board).model_copy(update={"name": "mac-2", "fingerprint": "fp_2"})
    write_figures(connection, ALIAS, other.model_copy(update={"at": other.at - SILENT_SECONDS - 1}))
    announce_often(board, clock)
    assert not caplog.messages, "the other one's worker has ended"
    write_figures(connection, ALIAS, other)
    announce_often(board, clock)
    [warning] = caplog.messages
    assert f"the workers of {ALIAS} serve different models (fp_1, fp_2)" in warning
    assert "--model-alias" in warning
    [model] = read_figures(connection)
    assert model.notes == [warning]


def test_workers_whose_limits_exceed_their_machine_are_told_once_and_shown(
    board: StatusBoard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    connection = board._connection
    connection.hset(MODELS_KEY, "other", INFO.model_dump_json())

    def write(name: str, host: str) -> None:
        figures = told(board).model_copy(update={"name": name, "host": host})
        write_figures(connection, "other", figures)

    here = told(board).host
    write("mac-2", here)
    write("mac-3", "another-mac")
    announce_often(board, clock)
    assert not caplog.messages, "16 GiB of 20 here, and 8 on another machine"
    write("mac-4", here)
    announce_often(board, clock)
    [warning] = caplog.messages
    assert "may take 24.0 GiB together (mac-1 8.0 GiB, mac-2 8.0 GiB, mac-4 8.0 GiB)" in warning
    assert "has 20.0 GiB; give each a --memory-limit" in warning
    assert {model.alias: model.notes for model in read_figures(connection)} == {
        ALIAS: [warning],
        "other": [warning],
    }


def test_a_worker_that_miscounts_pages_is_to_be_restarted(board: StatusBoard) -> None:
    connection, figures = board._connection, told(board)
    write_figures(connection, ALIAS, figures.model_copy(update={"miscounted_pages": 2}))
    [model] = read_figures(connection, ALIAS)
    assert model.notes == ["mac-1: 2 pages of its caches are miscounted; restart it"]


def test_figures_of_another_version_are_left_out(board: StatusBoard) -> None:
    board._connection.hset(workers_key(ALIAS), "newer", '{"name": "newer"}')
    board.show("busy")
    assert [worker.name for worker in read_workers(board._connection, ALIAS)] == ["mac-1"]


def test_the_overview_shows_models_queues_and_workers(
    redis_url: str, connection: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [enqueue(connection, priority="bulk", max_completion_tokens=900) for _ in range(3)]
    with running_worker(redis_url, max_rows=1, step_seconds=0.005, name="mac-1", mode="auto"):
        [model] = wait_for(lambda: [m for m in read_figures(connection) if m.workers])
        [worker] = model.workers
        Console(width=80).print(draw_figures([model]))
    printed = capsys.readouterr().out.splitlines()
    assert (model.alias, model.queues["high"].waiting) == (ALIAS, 0)
    assert worker.name == "mac-1"
    assert abs(worker.at - server_time(connection)) < 60
    assert any(line.split()[:2] == ["mac-1", worker.state] for line in printed)
    assert not all(map(is_over, waiting))
    assert read_figures(connection)[0].workers == []


def test_the_overview_says_when_nobody_works(
    redis_url: str, connection: Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_worker(redis_url):
        wait_for(lambda: read_figures(connection))
    Console(width=100).print(draw_figures(read_figures(connection)))
    assert f"no worker serves {ALIAS}" in capsys.readouterr().out
