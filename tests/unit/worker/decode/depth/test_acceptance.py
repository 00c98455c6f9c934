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
    copies = learnt(outcome("row", 8, 8, looked_up=True, foretold=True, found=True), 8)

    assert copies.totals()[8] > 7


def test_what_was_foretold_without_drafts_is_learnt_too() -> None:
    copies = learnt(outcome("row", 0, 0, looked_up=True, foretold=True, found=True), 0)
    strays = learnt(outcome("row", 0, 0, looked_up=True, foretold=False, found=True), 0)

    assert copies.totals()[1] > 0.9
    assert strays.totals()[1] < 0.1


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
        forced = 4 * (step % 2)
        acceptance.observe([outcome("held", forced, forced), outcome("free", 0, 0)], MOST)
    both = acceptance.totals()[4]
    acceptance.keep({"free": MOST})

    assert 1.5 < both < 2.5
    assert acceptance.totals() == [0.0] * (MOST + 1)


def test_lookups_that_fail_do_not_lower_what_the_model_itself_is_expected_to_do() -> None:
    acceptance = learnt(outcome("row", 3, 0, looked_up=True, foretold=False, found=True), 3)
    before = acceptance.totals()[3]
    acceptance.observe([outcome("row", 0, 0, foretold=False, found=False)], 0)

    assert before < 0.3
    assert acceptance.totals()[3] > 1.5


def test_where_a_predicted_match_is_gone_the_models_own_drafts_are_expected() -> None:
    acceptance = Acceptance(MOST, OWN)
    acceptance.keep({"row": MOST})
    for step in range(120):
        acceptance.decide()
        acceptance.observe([outcome("row", 3, 3, foretold=False, found=step % 2 == 1)], 3)
    acceptance.keep({"row": MOST})

    assert acceptance.totals()[3] > 2.5
    assert acceptance.totals()[MOST] < 1


def test_steps_that_did_not_search_say_nothing_of_lookups() -> None:
    acceptance = learnt(outcome("row", 8, 8, looked_up=True, foretold=True, found=True), 8)
    before = acceptance.totals()
    for _ in range(20):
        acceptance.decide()
        acceptance.observe([outcome("row", 0, 0)], 0)

    assert acceptance.totals() == before
