"""Depth policies: what they choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.decode.depth.policies import Mode, make_policy
from omlx_worker.decode.depth.records import RowView, StepReport
from tests.unit.worker.decode.depth.feeding import outcome, rows


def test_hybrid_changes_exactly_between_one_row_and_two() -> None:
    policy = make_policy("hybrid", 3)
    one, two, five = rows(3), rows(3, 3), rows(3, 3, 3, 3, 3)
    decisions = [
        policy.choose(batch, len(batch)) for batch in (one, one, two, five, two, one, [], one)
    ]
    assert [decision.depth for decision in decisions] == [3, 3, 0, 0, 0, 3, 0, 3]
    reasons = [decision.reason for decision in decisions[:6]]
    one, more = "one row", "more than one row"
    assert reasons == [one, one, more, more, more, one]


@pytest.mark.parametrize(("mode", "depths"), [("mtp", {"row0": 3, "row2": 1}), ("batched", {})])
def test_fixed_modes_stay_as_deep_as_rows_allow(mode: Mode, depths: dict[str, int]) -> None:
    decision = make_policy(mode, 3).choose(rows(4, 0, 1), 3)
    assert decision.depths == depths
    assert decision.depth == max(depths.values(), default=0)


def test_a_model_without_a_head_never_drafts() -> None:
    for mode in ("auto", "hybrid", "mtp", "batched"):
        assert make_policy(mode, 0).choose(rows(4), 1).depths == {}


batches = st.lists(
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.tuples(st.integers(0, 4), st.integers(1, 70_000)),
        max_size=8,
    ),
    min_size=1,
    max_size=60,
)


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
        decision = policy.choose(views, len(views))
        assert decision.depth == max(decision.depths.values(), default=0)
        for name, depth in decision.depths.items():
            assert 0 < depth <= min(batch[name][0], max_depth)
        seconds = data.draw(st.one_of(st.none(), st.floats(0, 10)))
        outcomes = [outcome(name, k, k // 2) for name, k in decision.depths.items()]
        policy.observe(StepReport(seconds, len(views), decision.depth, 5, outcomes))
