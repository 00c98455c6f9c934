from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from tests.helpers.checkpoints import write_llama, write_qwen
from tests.helpers.decoding import Loaded, small_classes


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A tiny dense Qwen3.5, loaded."""
    return Loaded.at(write_qwen(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def demo() -> Loaded:
    """The demo model, loaded."""
    return Loaded.demo()


@pytest.fixture(scope="session")
def heldout_prompts() -> list[str]:
    """Beginnings of functions that the demo model was not trained on."""
    lines = (resolve(DEMO) / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture
def small_buckets() -> Iterator[None]:
    """See `small_classes`."""
    with small_classes():
        yield
