"""What was measured outlives the worker that measured it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlx_worker.decode.depth.auto import AutoPolicy
from omlx_worker.decode.depth.decisions import Outcome, RowView, StepReport
from omlx_worker.decode.depth.knowledge import Knowledge


def taught() -> AutoPolicy:
    """A policy that has seen a step of depth 2 cost as much as one of depth 0."""
    policy = AutoPolicy(2)
    for depth in (0, 1, 2) * 40:
        outcomes = [Outcome("r", depth, depth)]
        policy.observe(StepReport(seconds=0.01, rows=1, depth=depth, outcomes=outcomes))
    return policy


def test_a_restarted_worker_goes_on_from_what_it_knew(tmp_path: Path) -> None:
    Knowledge(taught(), tmp_path / "new", "demo, cpu, 1").save(at_once=True)
    policy = AutoPolicy(2)
    Knowledge(policy, tmp_path / "new", "demo, cpu, 1")
    decision = policy.choose([RowView("r", 2)], 1)
    assert (decision.depth, decision.passing) == (2, False)


def test_another_model_device_or_version_measures_anew(tmp_path: Path) -> None:
    Knowledge(taught(), tmp_path, "demo, cpu, 1").save(at_once=True)
    policy = AutoPolicy(2)
    Knowledge(policy, tmp_path, "demo, cpu, 2")
    assert policy.choose([RowView("r", 2)], 1).passing


def test_saving_is_rare_unless_it_is_the_last_time(tmp_path: Path) -> None:
    knowledge = Knowledge(taught(), tmp_path, "demo")
    knowledge.save()
    assert not knowledge.path.exists()
    knowledge.save(at_once=True)
    assert knowledge.path.exists()


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Knowledge(taught(), tmp_path / "file", "demo").save(at_once=True)
    assert "the next start measures anew" in caplog.text
