"""Depth policies: what they choose, and what `auto` keeps for its next start."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.decode.depth.auto import FILE_VERSION
from omlx_worker.decode.depth.depth_trials import SOON
from omlx_worker.decode.depth.fixed import (
    AutoPolicy,
    HybridPolicy,
    Mode,
    Outcome,
    RowView,
    StepReport,
    make_policy,
)
from tests.simulation import workloads
from tests.simulation.engine import simulate
from tests.simulation.scenarios import MAX_DEPTH
from tests.simulation.tables import TABLES
from tests.unit.worker.decode.depth.feeding import feed, rows

KEY = "model, device, mlx 0.32.4"


def test_hybrid_changes_exactly_between_one_row_and_two() -> None:
    policy = HybridPolicy(3)
    one, two, five = rows(3), rows(3, 3), rows(3, 3, 3, 3, 3)
    decisions = [policy.choose(batch) for batch in (one, one, two, five, two, one, [], one)]
    assert [decision.depth for decision in decisions] == [3, 3, 0, 0, 0, 3, 0, 3]
    assert policy.transitions == 2
    reasons = [decision.reason for decision in decisions]
    assert len(set(reasons)) == 3
    assert reasons[2] == reasons[3] == reasons[4]
    assert reasons[5] == reasons[6] == reasons[7]
    assert reasons[5] == "the batch has drained to one row"


@pytest.mark.parametrize(("mode", "depths"), [("mtp", {"row0": 3, "row2": 1}), ("batched", {})])
def test_fixed_modes_stay_as_deep_as_rows_allow(mode: Mode, depths: dict[str, int]) -> None:
    decision = make_policy(mode, 3).choose(rows(4, 0, 1))
    assert decision.depths == depths
    assert decision.depth == max(depths.values(), default=0)


def test_a_model_without_a_head_never_drafts() -> None:
    for mode in ("auto", "hybrid", "mtp", "batched"):
        assert make_policy(mode, 0).choose(rows(4)).depths == {}


def test_what_was_learnt_survives_a_restart(tmp_path: Path) -> None:
    jobs, table = workloads.steady(6, 3), TABLES["apple"]
    before = AutoPolicy(MAX_DEPTH)
    simulate(before, table, jobs, max_steps=1000)
    before.save(tmp_path / "known.json", KEY)
    after, anew = AutoPolicy(MAX_DEPTH), AutoPolicy(MAX_DEPTH)
    assert after.load(tmp_path / "known.json", KEY)
    simulate(after, table, jobs, max_steps=SOON // 2)
    simulate(anew, table, jobs, max_steps=SOON // 2)
    assert after.trials == 0 < anew.trials


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "{}",
        json.dumps({"version": 1, "key": KEY, "costs": [], "acceptance": [[], []]}),
        json.dumps(
            {"version": FILE_VERSION, "key": "another", "costs": [], "acceptance": [[], []]}
        ),
        json.dumps(
            {"version": FILE_VERSION, "key": KEY, "costs": [[1, 0, 0, -1]], "acceptance": [[], []]}
        ),
        json.dumps({"version": FILE_VERSION, "key": KEY, "costs": [["a"]], "acceptance": [[], []]}),
        json.dumps({"version": FILE_VERSION, "key": KEY, "costs": [], "acceptance": [[1], [2]]}),
        json.dumps({"version": FILE_VERSION, "key": KEY, "costs": 3, "acceptance": None}),
    ],
)
def test_a_foreign_or_broken_file_is_ignored_with_a_word(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "known.json"
    path.write_text(content)
    policy = AutoPolicy(3)
    with caplog.at_level(logging.INFO):
        assert not policy.load(path, KEY)
    assert "measuring anew" in caplog.text
    feed(policy, 50, (1.0, 1.1, 1.2, 1.3), {"row0": 1, "row1": 1})


def test_no_file_is_no_trouble(tmp_path: Path) -> None:
    assert not AutoPolicy(3).load(tmp_path / "none.json", KEY)


def test_a_binary_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "known.json").write_bytes(b"\xff\xfe\x00")
    assert not AutoPolicy(3).load(tmp_path / "known.json", KEY)


batches = st.lists(
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.tuples(st.integers(0, 4), st.integers(1, 70_000)),
        max_size=8,
    ),
    min_size=1,
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(
    mode=st.sampled_from(["auto", "hybrid", "mtp", "batched"]),
    max_depth=st.integers(0, 4),
    script=batches,
    data=st.data(),
)
def test_no_row_drafts_deeper_than_it_may(
    mode: Mode, max_depth: int, script: list[dict[str, tuple[int, int]]], data: st.DataObject
) -> None:
    policy = make_policy(mode, max_depth)
    for batch in script:
        views = [RowView(name, limit, context) for name, (limit, context) in batch.items()]
        if not views:
            continue
        decision = policy.choose(views)
        assert decision.depth == max(decision.depths.values(), default=0)
        for name, depth in decision.depths.items():
            assert 0 < depth <= min(batch[name][0], max_depth)
        seconds = data.draw(st.one_of(st.none(), st.floats(0, 10)))
        outcomes = [Outcome(name, k, k // 2) for name, k in decision.depths.items()]
        policy.observe(StepReport(seconds, len(views), decision.depth, 5, outcomes))
