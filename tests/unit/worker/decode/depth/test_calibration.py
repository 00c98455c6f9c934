"""The calibration grid on an engine without a model, and its file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.depth import calibration
from omlx_worker.decode.depth.auto import INTERVAL, AutoPolicy
from omlx_worker.decode.depth.calibration import FILE_VERSION, Calibration
from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.engine.row import Emission
from tests.helpers.fake_engine import FakeEngine
from tests.unit.worker.decode.depth.feeding import feed


class Drafting(FakeEngine):
    """Takes longer with more slots and drafts, on a clock of its own."""

    now = 0.0

    def __init__(self, max_rows: int = 4) -> None:
        super().__init__(max_rows)
        self.max_depth = 2

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        assert depths is not None
        assert depths.keys() == self.states.keys()
        Drafting.now += 0.01 * self.slots * (1 + max(depths.values()))
        return super().step(depths)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.time, "monotonic", lambda: Drafting.now)


def calibrate(
    engine: FakeEngine, folder: Path, limit: int = 1 << 40, *, measures: bool = True
) -> tuple[AutoPolicy, Calibration]:
    policy = AutoPolicy(2)
    budget = MemoryBudget(limit, 0, engine.bytes_for)
    return policy, Calibration(policy, engine, budget, folder, measures=measures)


def known(policy: AutoPolicy) -> dict[tuple[int, int], float]:
    cells = policy.cells.items()
    return {(slots, k): cell.seconds(k) for (slots, _), cell in cells for k in cell.depths}


def test_all_powers_of_two_and_depths_are_measured_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Drafting()
    policy, grid = calibrate(engine, tmp_path / "new")
    with caplog.at_level(logging.INFO):
        while grid.step():
            pass

    expected = {(slots, k): 0.01 * slots * (1 + k) for slots in (1, 2, 4) for k in (0, 1, 2)}
    assert known(policy) == pytest.approx(expected)
    assert engine.states == {}
    assert sum("measuring" in record.message for record in caplog.records) == 1

    restored, again = calibrate(Drafting(), tmp_path / "new")
    assert known(restored) == pytest.approx(expected)
    assert not again.step()


def test_a_depth_that_was_slow_while_it_was_measured_is_soon_timed_again(tmp_path: Path) -> None:
    policy, grid = calibrate(Drafting(), tmp_path)
    while grid.step():
        pass
    restored, _ = calibrate(Drafting(), tmp_path)
    for each in (policy, restored):
        made = feed(each, 6 * INTERVAL, (0.02, 0.04, 0.03), [2, 1])
        assert made[0] < 2
        assert made[-1] == 2


def test_a_job_has_the_engine_to_itself_and_calibration_goes_on_later(tmp_path: Path) -> None:
    engine = Drafting()
    policy, grid = calibrate(engine, tmp_path)
    driver = DepthDriver(policy, 2, grid)
    for _ in range(40):
        assert driver.idle()
    before = known(policy)
    driver.give_way()
    assert engine.states == {}
    while driver.idle():
        pass
    assert before.keys() < known(policy).keys() == {(s, k) for s in (1, 2, 4) for k in (0, 1, 2)}


def test_no_drafts_are_looked_up_in_its_texts(tmp_path: Path) -> None:
    engine = Drafting()
    _, grid = calibrate(engine, tmp_path)
    assert grid.step()
    assert [state.row.cache for state in engine.states.values()] == [False]


def test_it_ends_after_thirty_seconds(tmp_path: Path) -> None:
    policy, grid = calibrate(Drafting(max_rows=64), tmp_path)
    began = Drafting.now
    while grid.step():
        pass
    assert 30 <= Drafting.now - began < 33
    assert 0 < len(known(policy)) < 21


def test_rows_beyond_the_memory_budget_are_not_measured(tmp_path: Path) -> None:
    engine = Drafting()
    two = engine.bytes_for([(16, 1040)] * 2)
    policy, grid = calibrate(engine, tmp_path, two)
    while grid.step():
        pass
    assert {slots for slots, _ in known(policy)} == {1, 2}
    assert engine.most_rows == 2


def test_switched_off_it_runs_nothing(tmp_path: Path) -> None:
    _, grid = calibrate(Drafting(), tmp_path, measures=False)
    assert not grid.step()


def test_an_engine_that_fails_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Drafting):
        def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
            raise RuntimeError("the device was lost")

    engine = Broken()
    _, grid = calibrate(engine, tmp_path)
    while grid.step():
        pass
    assert "calibration ends" in caplog.text
    assert engine.states == {}


def saved(**changes: object) -> str:
    good = {
        "version": FILE_VERSION,
        "key": "fake, own depth 2",
        "costs": [],
        "acceptance": [[], []],
    }
    return json.dumps(good | changes)


def test_costs_are_not_those_of_another_own_depth(tmp_path: Path) -> None:
    engine = Drafting()
    budget = MemoryBudget(1 << 40, 0, engine.bytes_for)
    grid = Calibration(AutoPolicy(2, own_depth=1), engine, budget, tmp_path)
    while grid.step():
        pass

    other = AutoPolicy(2, own_depth=2)
    Calibration(other, engine, budget, tmp_path)

    assert known(other) == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe\x00",
        saved(version=1).encode(),
        saved(key="another").encode(),
        saved(costs=[[1, 0, 0, 0.1], [1, 0, 0, -1]]).encode(),
        saved(costs=[["a"]]).encode(),
        saved(costs=3, acceptance=None).encode(),
        saved(costs=[[1, 0, 0, 0.1]], acceptance=[[1], [2]]).encode(),
    ],
)
def test_a_foreign_or_damaged_file_is_ignored_with_a_word(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, grid = calibrate(Drafting(), tmp_path)
    grid.path.write_bytes(content)
    with caplog.at_level(logging.INFO):
        policy, _ = calibrate(Drafting(), tmp_path)
    assert "measuring anew" in caplog.text
    assert known(policy) == {}


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    _, grid = calibrate(Drafting(), tmp_path / "file")
    grid.save(at_once=True)
    assert "the next start measures anew" in caplog.text
