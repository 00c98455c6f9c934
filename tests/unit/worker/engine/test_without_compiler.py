"""Where MLX compiles nothing, as on a CPU without g++, steps run unfused, and the log says why."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels.compiling import VARIABLE, compiles
from omlx_worker.engine.loading import loader
from omlx_worker.engine.loading.loader import choose_fusion
from omlx_worker.engine.warm_up import WarmUp
from tests.helpers.decoding import Loaded, row, run

PROMPTS = {"a": [5, 6, 7], "b": [9, 20]}


@pytest.fixture
def unfused() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_functions_are_compiled_on_a_gpu_or_with_a_compiler() -> None:
    on_cpu = mx.default_device() == mx.cpu
    assert compiles() == (not on_cpu or shutil.which("g++") is not None)


@pytest.mark.usefixtures("unfused")
def test_the_same_tokens_come_out_and_no_step_counts_as_traced(qwen: Loaded) -> None:
    assert not compiles()
    decoder = qwen.decoder(2)

    got = run(decoder, [row(name, prompt, 30) for name, prompt in PROMPTS.items()])

    assert got == {name: qwen.greedy(prompt, 30) for name, prompt in PROMPTS.items()}
    assert decoder.traces == 0


@pytest.mark.usefixtures("unfused")
def test_nothing_is_run_before_rows_come_for_there_is_nothing_to_trace(qwen: Loaded) -> None:
    warm = WarmUp(qwen.decoder(depth=1), max_rows=64)
    assert not warm.next(first=True)
    warm.met(64)
    assert not warm.next()


@pytest.mark.usefixtures("unfused")
def test_the_log_names_the_variable_that_turned_it_off_or_the_compiler_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    choose_fusion("other")
    assert not compiles()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(loader, "compiles", lambda: False)
    choose_fusion("other")
    by_user, without_compiler = caplog.messages
    assert "mx.compile is off (MLX_DISABLE_COMPILE is set): steps run unfused" in by_user
    assert "mx.compile is off (on a CPU it needs g++, which does not run)" in without_compiler


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's kernels compile fast")
@pytest.mark.usefixtures("unfused")
def test_on_a_cpu_the_demo_model_is_not_compiled_and_the_next_model_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    mx.enable_compile()
    with caplog.at_level(logging.INFO, "omlx_worker"):
        choose_fusion("demo")
        assert not compiles()
        choose_fusion("other")
    assert compiles() == (shutil.which("g++") is not None)
    assert "mx.compile is off for demo" in caplog.messages[0]
