"""The files of a repository: what is downloaded when, and what is told meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

from omlx_worker.engine.loading.checkpoint import resolve
from omlx_worker.engine.loading.identity import fingerprint_of
from omlx_worker.engine.loading.loader import describe
from tests.helpers.checkpoints import write_llama
from tests.helpers.hub import Hub

NAME = "makers/model"


def test_a_model_is_described_before_its_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = write_llama(tmp_path / "model")
    before = describe(NAME)
    assert hub.weights_served == []
    assert before.system_fingerprint is None, "it is a hash of the weights"
    path = resolve(NAME)
    assert hub.weights_served == ["model.safetensors"]
    fingerprint = fingerprint_of(path)
    assert describe(NAME) == before.model_copy(update={"system_fingerprint": fingerprint})


def test_a_download_tells_how_far_it_is(hub: Hub, tmp_path: Path) -> None:
    hub.repositories[NAME] = write_llama(tmp_path / "model")
    told: list[str] = []
    resolve(NAME, tell=told.append)
    shown = re.fullmatch(r"downloading, (.+) of (.+)", told[-1])
    assert shown
    assert shown[1] == shown[2]
    resolve(NAME, tell=lambda progress: told.append(f"again: {progress}"))
    assert not told[-1].startswith("again"), "nothing is left to download"
