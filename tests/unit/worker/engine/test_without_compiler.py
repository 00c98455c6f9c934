"""Where MLX compiles nothing, as on a CPU without g++, steps run unfused and say so once."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels.compiling import compiles
from omlx_worker.engine.loading.loader import load
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
def test_loading_a_model_logs_one_line(llama_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "omlx_worker"):
        load(llama_path)
    [line] = caplog.messages
    assert "g++" in line
    assert "unfused" in line
