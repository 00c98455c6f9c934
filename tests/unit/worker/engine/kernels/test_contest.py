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
from omlx_worker.engine.kernels.contest import Contest
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


def held(contest: Contest, plain: Form, kernel: Form, size: str = "8 rows") -> mx.array:
    x = mx.arange(8).astype(mx.float32)
    out: mx.array = contest.run("doubling", size, {"plain": plain, "kernel": kernel}, [x])
    return out


def test_the_faster_form_runs() -> None:
    contest = Contest()
    held(contest, slow(doubled), fast, "8 rows, a slow plain form")
    held(contest, doubled, slow(fast), "8 rows, a slow kernel")

    first, second = contest.results
    assert (first.form, second.form) == ("kernel", "plain")
    assert "doubling, 8 rows, a slow plain form: kernel; plain" in str(first)
    assert not first.faults | second.faults


def test_the_fastest_of_several_kernels_runs_and_a_wrong_one_is_told() -> None:
    contest = Contest()
    forms = {"plain": slow(doubled), "slow": slow(slow(fast)), "fast": fast, "wrong": wrong}

    out = contest.run("twice", "8 rows", forms, [mx.ones(8)])

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
    contest.run("product", "8 rows", forms, [mx.ones(8), mx.ones((2, 2), mx.uint32)])

    assert contest.results[0].form == "plain"


def test_a_size_is_decided_once_also_while_a_step_is_traced() -> None:
    contest, calls = Contest(), list[int]()

    def counted(x: mx.array) -> mx.array:
        calls.append(1)
        return fast(x)

    forms = {"plain": slow(doubled), "kernel": counted}
    step: Callable[[mx.array], mx.array] = mx.compile(
        lambda x: contest.run("doubling", "8 rows", forms, [x])
    )
    assert mx.array_equal(step(mx.ones(8)), mx.full(8, 2)).item()
    tried = len(calls)
    step(mx.ones(8))
    contest.run("doubling", "8 rows", forms, [mx.ones(8)])

    assert len(calls) <= tried + 1
    assert contest.contests == len(contest.results) == 1


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


def test_a_folder_that_is_none_is_told_and_the_faster_form_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "file"
    folder.write_text("")

    contest = Contest(folder)
    held(contest, slow(doubled), fast)

    assert str(folder) in caplog.text
    assert next(iter(contest.results)).form == "kernel"
