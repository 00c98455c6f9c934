"""What rows may be expected to accept, by who drafts."""

from __future__ import annotations

from omlx_worker.decode.depth.acceptance import Acceptance
from omlx_worker.engine.row import Emission
from tests.unit.worker.decode.depth.feeding import outcome

OWN, MOST = 3, 8


def learnt(emission: Emission, depth: int, steps: int = 60) -> Acceptance:
    """What is known after steps that all had this outcome, for the one row there is."""
    acceptance = Acceptance(MOST, OWN)
    acceptance.keep({"row": MOST})
    for _ in range(steps):
        acceptance.decide()
        acceptance.observe([emission], depth)
    acceptance.keep({"row": MOST})
    return acceptance


def test_a_copying_row_is_expected_to_accept_as_deep_as_lookups_go() -> None:
    copies = learnt(outcome("row", 8, 8, "lookup"), 8)

    assert copies.totals()[8] > 7


def test_a_row_without_a_match_has_no_drafts_in_steps_deeper_than_the_models_own() -> None:
    ordinary = learnt(outcome("row", 3, 2), 3)

    assert 1.5 < ordinary.totals()[3] < 2.5
    assert ordinary.totals()[MOST] == 0


def test_a_constrained_row_is_expected_to_accept_what_its_grammar_forces() -> None:
    acceptance = Acceptance(MOST, own_depth=0)
    limits = {"held": MOST, "free": MOST}
    for step in range(120):
        acceptance.keep(limits, {"held"})
        acceptance.decide()
        held = outcome("held", 4, 4, "grammar") if step % 2 else outcome("held", 0, 0)
        acceptance.observe([held, outcome("free", 0, 0)], MOST)
    both = acceptance.totals()[4]
    acceptance.keep({"free": MOST})

    assert 1.5 < both < 2.5
    assert acceptance.totals() == [0.0] * (MOST + 1)


def test_lookups_that_fail_do_not_lower_what_the_model_itself_is_expected_to_do() -> None:
    acceptance = learnt(outcome("row", 3, 0, "lookup"), 3)
    before = acceptance.totals()[3]
    acceptance.observe([outcome("row", 0, 0)], 0)

    assert before < 0.3
    assert acceptance.totals()[3] > 1.5


def test_a_row_that_finds_a_match_is_expected_to_draft_deeper_before_any_is_judged() -> None:
    acceptance = learnt(outcome("row", 0, 0), 0)
    before = acceptance.totals()[MOST]
    acceptance.observe([outcome("row", 0, 0, "lookup")], 0)

    assert before == 0
    assert acceptance.totals()[MOST] > 2


def test_a_predicted_match_that_is_gone_lowers_what_is_expected_of_matches() -> None:
    acceptance = learnt(outcome("row", 8, 8, "lookup"), 8)
    before = acceptance.totals()[MOST]
    for step in range(60):
        acceptance.decide()
        missed = outcome("row", 0, 0) if step % 2 else outcome("row", 8, 8, "lookup")
        acceptance.observe([missed], MOST)
    acceptance.observe([outcome("row", 0, 0, "lookup")], 0)

    assert acceptance.totals()[MOST] < before - 1
