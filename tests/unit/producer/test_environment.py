"""A variable with a wrong name is not ignored in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlx_producer.environment import KNOWN, PREFIX, warn_of_unknown_variables
from omlx_worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def warnings() -> list[str]:
    told: list[str] = []
    warn_of_unknown_variables(told.append)
    return told


def test_the_known_names_are_the_settings_of_the_worker() -> None:
    settings = {PREFIX + name.upper() for name in WorkerSettings.model_fields}
    assert settings == KNOWN


def test_a_name_close_to_a_known_one_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_ULR", "redis://a")
    said = "OMLX_QUEUE_REDIS_ULR has no effect: did you mean OMLX_QUEUE_REDIS_URL?"
    assert warnings() == [said]


def test_the_prefix_makes_no_name_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_QUEUE_FOO", "1")
    assert warnings() == ["OMLX_QUEUE_FOO has no effect: no setting has this name; unset it"]


def test_a_setting_that_is_gone_names_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMLX_QUEUE_PREFIX_DIR", "there")
    [said] = warnings()
    assert said.startswith("OMLX_QUEUE_PREFIX_DIR has no effect: leave it out (after a restart")


def test_a_name_in_the_file_counts_too_and_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text(
        "OMLX_QUEUE_FLAVOUR_OF_ICE=red\nFLAVOUR_OF_ICE=red\nOMLX_QUEUE_MODE=auto\n"
    )
    said = "OMLX_QUEUE_FLAVOUR_OF_ICE has no effect: no setting has this name; unset it"
    assert warnings() == [said]
    monkeypatch.setenv("OMLX_QUEUE_FLAVOUR_OF_ICE", "blue")
    assert warnings() == [said]


def test_case_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("omlx_queue_redis_url", "redis://a")
    assert warnings() == []
