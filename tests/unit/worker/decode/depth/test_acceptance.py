"""What rows may be expected to accept, by who drafts."""

from __future__ import annotations

import pytest

from omlx_worker.decode.depth.acceptance import Acceptance, RowView
from omlx_worker.engine.rows.emission import Emission
from tests.unit.worker.decode.depth.feeding import outcome, rows

OWN, MOST = 3, 8
ROW = RowView("row0", MOST)


def learnt(emission: Emission, depth: int, steps: int = 60) -> Acceptance:
    """What is known after steps that all had this outcome, for the one row there is."""
    acceptance = Acceptance(MOST, OWN)
    for _ in range(steps):
        acceptance.expected([ROW])
        acceptance.observe([emission], depth)
    return acceptance


def test_a_copying_row_is_expected_to_accept_as_deep_as_lookups_go() -> None:
    assert learnt(outcome("row0", 8, 8, "lookup"), 8).expected([ROW])[MOST] > 7


def test_a_row_without_a_match_has_no_drafts_in_steps_deeper_than_the_models_own() -> None:
    ordinary = learnt(outcome("row0", 3, 2), 3).expected([ROW])

    assert 1.5 < ordinary[OWN] < 2.5
    assert ordinary[MOST] == 0


def test_acceptance_that_changes_is_followed() -> None:
    acceptance = learnt(outcome("row0", 3, 3), 3, 1000)
    for _ in range(100):
        acceptance.observe([outcome("row0", 3, 0)], 3)

    assert acceptance.expected([ROW])[1] < 0.3


def test_a_row_counts_for_as_many_drafts_as_it_may_have() -> None:
    acceptance = learnt(outcome("row0", 3, 3), 3)

    assert acceptance.expected(rows(3, 1, 0))[OWN] == pytest.approx(
        acceptance.expected(rows(3))[OWN] + acceptance.expected(rows(1))[1]
    )


def test_a_constrained_row_is_expected_to_accept_what_its_grammar_forces() -> None:
    acceptance = Acceptance(MOST, own_depth=0)
    held, free = RowView("held", MOST, constrained=True), RowView("free", MOST)
    for step in range(120):
        acceptance.expected([held, free])
        forced = outcome("held", 4, 4, "grammar") if step % 2 else outcome("held", 0, 0)
        acceptance.observe([forced, outcome("free", 0, 0)], MOST)
    # Without drafts nobody asks the grammar.
    for _ in range(60):
        acceptance.observe([outcome("held", 0, 0), outcome("free", 0, 0)], 0)

    assert 1.5 < acceptance.expected([held])[4] < 2.5
    assert acceptance.expected([free]) == [0.0] * (MOST + 1)


def test_lookups_that_fail_do_not_lower_what_the_model_itself_is_expected_to_do() -> None:
    acceptance = learnt(outcome("row0", 3, 0, "lookup"), 3)
    before = acceptance.expected([ROW])[OWN]
    for _ in range(30):
        acceptance.observe([outcome("row0", 0, 0)], 0)

    assert before < 0.3
    assert acceptance.expected([ROW])[OWN] > 1.5


def test_a_row_that_finds_matches_is_expected_to_draft_deeper_before_any_is_judged() -> None:
    before = learnt(outcome("row0", 0, 0), 0).expected([ROW])
    after = learnt(outcome("row0", 0, 0, "lookup"), 0).expected([ROW])

    assert before[MOST] == 0
    assert after[MOST] > 2


def test_matches_that_are_gone_lower_what_is_expected_of_matches() -> None:
    acceptance = learnt(outcome("row0", 8, 8, "lookup"), 8)
    before = acceptance.expected([ROW])[MOST]
    for step in range(60):
        missed = outcome("row0", 0, 0) if step % 2 else outcome("row0", 8, 8, "lookup")
        acceptance.observe([missed], MOST)

    assert 0.3 * before < acceptance.expected([ROW])[MOST] < 0.7 * before
