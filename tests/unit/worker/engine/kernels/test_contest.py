"""Forms of one computation: one that is wrong or fails is not used, else the faster one is."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels import trial
from omlx_worker.engine.kernels.contest import CallSize, Contest
from omlx_worker.engine.kernels.trial import Form


def doubled(x: mx.array) -> mx.array:
    return 2 * x


def fast(x: mx.array) -> mx.array:
    return x + x


def off_by_a_rounding(x: mx.array) -> mx.array:
    return 2 * x * (1 + 1e-5)


def wrong(x: mx.array) -> mx.array:
    return 2.1 * x


def wrong_in_one(x: mx.array) -> mx.array:
    return mx.where(mx.arange(x.size) == 3, mx.nan, 2 * x)


def failing(x: mx.array) -> mx.array:
    raise RuntimeError("Unable to build metal library from source\nsource:1: error")


def refusing(x: mx.array) -> mx.array:
    raise ValueError("it does not take vectors")


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CACHED", 1 << 12)


@pytest.fixture(autouse=True)
def time_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that compute at the same time do not count."""
    monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=time.process_time))


def slow(form: Form) -> Form:
    """A form whose evaluation takes long."""

    def run(x: mx.array) -> mx.array:
        out: mx.array = form(x)
        burden = mx.random.normal((200, 200))
        return out + 0 * (burden @ burden).sum()

    return run


def of(rows: int, kind: str = "floats") -> CallSize:
    return CallSize({"rows": rows}, kind)


def held(contest: Contest, plain: Form, kernel: Form, size: CallSize | None = None) -> mx.array:
    size = size or of(8)
    x = mx.arange(size.numbers["rows"]).astype(mx.float32)
    out: mx.array = contest.run("doubling", size, {"plain": plain, "kernel": kernel}, [x])
    return out


def test_the_faster_form_runs() -> None:
    contest = Contest()
    held(contest, slow(doubled), fast, of(8, "a slow plain form"))
    held(contest, doubled, slow(fast), of(8, "a slow kernel"))

    first, second = contest.results
    assert (first.form, second.form) == ("kernel", "plain")
    assert "doubling, 8 rows, a slow plain form: kernel; plain" in str(first)
    assert not first.faults | second.faults


def test_the_fastest_of_several_kernels_runs_and_a_wrong_one_is_told() -> None:
    contest = Contest()
    forms = {"plain": slow(doubled), "slow": slow(slow(fast)), "fast": fast, "wrong": wrong}

    out = contest.run("twice", of(8), forms, [mx.ones(8)])

    assert mx.array_equal(out, mx.full(8, 2)).item()
    [result] = contest.results
    assert (result.form, set(result.microseconds)) == ("fast", {"plain", "slow", "fast"})
    assert set(result.faults) == {"wrong"}


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (wrong, "it is .* off"),
        (wrong_in_one, "it is nan off"),
        (failing, "Unable to build metal library from source"),
        (refusing, "it does not take vectors"),
    ],
)
def test_a_kernel_that_is_wrong_or_fails_is_not_used_and_told(
    kernel: Form, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    contest = Contest()

    out = held(contest, slow(doubled), kernel)

    assert mx.array_equal(out, 2 * mx.arange(8)).item()
    [result] = contest.results
    assert result.form == "plain"
    assert re.search(reason, result.faults["kernel"])
    assert caplog.text.count("the kernel of doubling is not used") == 1


def test_a_difference_of_roundings_is_no_fault() -> None:
    contest = Contest()
    held(contest, slow(doubled), off_by_a_rounding)

    assert next(iter(contest.results)).form == "kernel"


def test_a_form_that_reads_twice_pays_for_it_as_in_a_step_that_reads_from_memory() -> None:
    contest, cached = Contest(), deque[int](maxlen=4)

    def plain(x: mx.array, _: mx.array) -> mx.array:
        return slow(doubled)(x)

    def fast_if_cached(x: mx.array, weight: mx.array) -> mx.array:
        form = fast if id(weight) in cached else slow(slow(slow(fast)))
        cached.append(id(weight))
        return form(x)

    forms = {"plain": plain, "kernel": fast_if_cached}
    contest.run("product", of(8), forms, [mx.ones(8), mx.ones((2, 2), mx.uint32)])

    assert contest.results[0].form == "plain"


def test_a_size_is_decided_once_also_while_a_step_is_traced() -> None:
    contest, calls = Contest(), list[int]()

    def counted(x: mx.array) -> mx.array:
        calls.append(1)
        return fast(x)

    forms = {"plain": slow(doubled), "kernel": counted}
    step: Callable[[mx.array], mx.array] = mx.compile(
        lambda x: contest.run("doubling", of(8), forms, [x])
    )
    assert mx.array_equal(step(mx.ones(8)), mx.full(8, 2)).item()
    tried = len(calls)
    step(mx.ones(8))
    contest.run("doubling", of(8), forms, [mx.ones(8)])

    assert len(calls) <= tried + 1
    assert contest.contests == len(contest.results) == 1


def serving() -> Contest:
    """A contest of a worker with rows, in which 4 and 16 rows were decided before they came."""
    contest = Contest()
    for rows, plain, kernel in ((4, doubled, slow(fast)), (16, slow(doubled), fast)):
        held(contest, plain, kernel, of(rows))
    contest.eager = False
    return contest


def test_rows_never_wait_for_a_contest() -> None:
    contest, calls = serving(), list[int]()

    def counted(x: mx.array) -> mx.array:
        calls.append(1)
        return fast(x)

    for _ in range(2):
        held(contest, slow(doubled), counted, of(8))

    assert len(calls) == 2
    assert contest.contests == 2
    assert contest.waiting == ["doubling, 8 rows, floats"]


@pytest.mark.parametrize(
    ("rows", "kind", "form"),
    [
        (3, "floats", "plain"),
        (8, "floats", "kernel"),
        (17, "floats", "kernel"),
        (8, "others", "plain"),
    ],
)
def test_an_undecided_size_borrows_the_form_of_the_next_larger_or_the_largest(
    rows: int, kind: str, form: str
) -> None:
    contest, ran = serving(), list[str]()

    def told(name: str) -> Form:
        return lambda x: ran.append(name) or doubled(x)

    held(contest, told("plain"), told("kernel"), of(rows, kind))

    assert ran == [form]


def test_a_kernel_that_was_wrong_at_another_size_is_not_borrowed() -> None:
    contest = Contest()
    held(contest, slow(doubled), wrong, of(16))
    contest.eager = False

    assert mx.array_equal(held(contest, doubled, wrong), 2 * mx.arange(8)).item()


def test_an_idle_worker_decides_what_rows_met() -> None:
    contest = serving()
    held(contest, doubled, slow(fast), of(8))
    held(contest, doubled, slow(fast), of(3))

    # The first of them ran the kernel, so what was traced is out of date when both are decided.
    assert [contest.decide_next() for _ in range(3)] == [False, True, False]

    assert contest.contests == len(contest.results) == 4
    assert not contest.waiting


def test_a_size_that_waits_keeps_no_array_of_its_row_alive() -> None:
    contest = serving()
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(2):
        x = mx.ones(1 << 20)
        mx.eval(contest.run("doubling", of(5, "large"), {"plain": doubled, "kernel": fast}, [x]))

    del x
    assert contest.waiting
    assert mx.get_active_memory() - before < 1 << 20


def test_what_is_traced_before_a_worker_is_ready_is_decided_then() -> None:
    contest = serving()
    held(contest, doubled, slow(fast))
    contest.eager = True
    held(contest, doubled, slow(fast))

    assert contest.contests == 3
    assert not contest.waiting


def test_a_restart_uses_the_same_forms_without_a_trial(tmp_path: Path) -> None:
    held(Contest(tmp_path), slow(doubled), fast)

    again = Contest(tmp_path)
    held(again, slow(doubled), wrong)

    assert next(iter(again.results)).form == "kernel"


def test_a_file_that_cannot_be_read_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held(Contest(tmp_path), slow(doubled), fast)
    [file] = tmp_path.iterdir()
    file.write_text("{")

    held(Contest(tmp_path), slow(doubled), fast)

    assert "timed anew" in caplog.text
    assert file.read_text().startswith("[")
