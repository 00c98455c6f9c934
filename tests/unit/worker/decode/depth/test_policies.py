"""Depth policies: what they choose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.policies import Mode
from omlx_worker.decode.depth_driver import make_policy
from tests.unit.worker.decode.depth.feeding import outcome, rows


def test_hybrid_changes_exactly_between_one_row_and_two() -> None:
    policy = make_policy("hybrid", 3, 3)
    one, two, five = rows(3), rows(3, 3), rows(3, 3, 3, 3, 3)
    decisions = [
        policy.choose(batch, len(batch)) for batch in (one, one, two, five, two, one, [], one)
    ]
    assert [depth for depth, _ in decisions] == [3, 3, 0, 0, 0, 3, 0, 3]
    reasons = [reason for _, reason in decisions[:6]]
    one, more = "one row", "more than one row"
    assert reasons == [one, one, more, more, more, one]


@pytest.mark.parametrize(("mode", "depth"), [("mtp", 3), ("batched", 0)])
def test_fixed_modes_stay_at_their_depth(mode: Mode, depth: int) -> None:
    assert make_policy(mode, 3, 3).choose(rows(4, 0, 1), 3) == (depth, f"depth {depth} throughout")


def test_a_model_without_a_head_never_drafts() -> None:
    for mode in ("auto", "hybrid", "mtp", "batched"):
        assert make_policy(mode, 0, 0).choose(rows(4), 1)[0] == 0


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
def test_no_policy_drafts_deeper_than_the_model_does(
    mode: Mode, max_depth: int, script: list[dict[str, tuple[int, int]]], data: st.DataObject
) -> None:
    policy = make_policy(mode, max_depth, max_depth)
    for batch in script:
        views = [RowView(name, limit, context) for name, (limit, context) in batch.items()]
        if not views:
            continue
        depth, _ = policy.choose(views, len(views))
        assert 0 <= depth <= max_depth
        seconds = data.draw(st.one_of(st.none(), st.floats(0, 10)))
        drafted = {view.row_id: min(depth, view.limit) for view in views}
        outcomes = [outcome(name, k, k // 2) for name, k in drafted.items()]
        policy.observe(outcomes, max(drafted.values()), seconds)
