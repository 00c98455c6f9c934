"""Before each step a policy is asked; after it, it is told what the step before came to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from omlx_worker.decode.depth.driver import Pacing
from omlx_worker.decode.depth.fixed import Decision, RowView, StepReport, make_policy
from omlx_worker.engine.interface import Emission, Row, Sampling


class Scripted:
    """A policy that drafts as told and keeps what it hears."""

    def __init__(self, *depths: int) -> None:
        self.transitions = 0
        self._depths = list(depths)
        self.seen: list[Sequence[RowView]] = []
        self.reports: list[StepReport] = []

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int | None = None,
        coming: int = 0,
        *,
        reading: bool = False,
    ) -> Decision:
        self.seen.append(rows)
        depth = self._depths.pop(0)
        depths = {row.row_id: min(depth, row.limit) for row in rows if min(depth, row.limit)}
        return Decision(depth, depths, f"depth {depth}")

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


def row(name: str, depth: int | None = None, prompt: int = 5) -> Row:
    return Row(name, [1] * prompt, 50, Sampling(), depth=depth)


def emitted(name: str, tokens: int, drafted: int) -> Emission:
    return Emission(name, [7] * tokens, "x", drafted=drafted, accepted=tokens - 1)


def test_every_row_is_named_and_keeps_its_own_limit() -> None:
    pacing = Pacing(Scripted(3, 3), depth=4)
    for member in (row("free"), row("none", depth=0), row("one", depth=1), row("many", depth=9)):
        pacing.add(member)

    depths = pacing.before(["free", "none", "one", "many"], slots=4)

    assert depths == {"free": 3, "none": 0, "one": 1, "many": 3}


def test_a_report_speaks_of_the_step_that_has_landed() -> None:
    policy = Scripted(2, 1, 0, 0)
    pacing = Pacing(policy, depth=2)
    pacing.add(row("a"))
    pacing.before(["a"], slots=1)
    pacing.after([])
    pacing.before(["a"], slots=1)
    pacing.after([emitted("a", 1, 0)])
    pacing.before(["a"], slots=1)
    pacing.after([emitted("a", 3, 2)])

    first, second = policy.reports
    assert (first.depth, first.drafted) == (0, 2)
    assert (second.depth, second.drafted) == (2, 1)
    assert [tuple(outcome) for outcome in second.outcomes] == [("a", 2, 2)]
    assert [views[0].context for views in policy.seen] == [5, 5, 6]


def test_the_time_of_a_step_that_was_disturbed_is_not_reported() -> None:
    policy = Scripted(1, 1, 1)
    pacing = Pacing(policy, depth=1)
    pacing.add(row("a"))
    pacing.before(["a"], slots=1)
    pacing.after([])
    pacing.disturb()
    pacing.before(["a"], slots=1)
    pacing.after([emitted("a", 1, 1)])
    pacing.before(["a"], slots=1)
    pacing.after([emitted("a", 1, 1)])

    assert policy.reports[0].seconds is None
    assert policy.reports[1].seconds is not None


def test_a_step_around_which_the_depth_changes_is_known_as_one() -> None:
    pacing = Pacing(Scripted(2, 2, 2, 0, 0, 0), depth=2)
    pacing.add(row("a"))
    pacing.before(["a"], slots=1)
    pacing.after([])
    changing = []
    for judged in (0, 2, 2, 0, 0):
        pacing.before(["a"], slots=1)
        pacing.after([emitted("a", 1, judged)])
        changing.append(pacing.changes_depth)

    assert changing == [True, False, True, False, False]


def test_hybrid_says_once_when_drafting_ends_and_when_it_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pacing = Pacing(make_policy("hybrid", 3), depth=3)
    with caplog.at_level(logging.INFO):
        pacing.add(row("a"))
        for _ in range(3):
            assert pacing.before(["a"], slots=1) == {"a": 3}
        pacing.add(row("b"))
        for _ in range(3):
            assert pacing.before(["a", "b"], slots=2) == {"a": 0, "b": 0}
        pacing.remove("b")
        for _ in range(3):
            assert pacing.before(["a"], slots=1) == {"a": 3}
        pacing.remove("a")
        pacing.add(row("c"))
        pacing.before(["c"], slots=1)

    assert pacing.transitions == 2
    said = [record.message for record in caplog.records if record.message.startswith("drafting ")]
    assert said == [
        "drafting ends with 2 rows: more than one row",
        "drafting begins with 1 row: the batch has drained to one row",
    ]


def test_modes_without_drafts_never_ask_for_any() -> None:
    for policy in (make_policy("batched", 4), make_policy("auto", 0), make_policy("mtp", 0)):
        pacing = Pacing(policy, depth=0)
        pacing.add(row("a"))
        assert pacing.before(["a"], slots=1) == {"a": 0}


def test_a_step_is_told_with_the_context_of_the_rows_that_decoded() -> None:
    policy = Scripted(0, 0)
    pacing = Pacing(policy, depth=0)
    pacing.add(row("paused", prompt=30_000))
    pacing.add(row("short", prompt=100))
    for _ in range(2):
        pacing.before(["short"], slots=1)
        pacing.after([emitted("short", 1, 0)])
    assert [report.context for report in policy.reports] == [100, 101]


def test_steps_that_were_disturbed_are_told_without_their_time() -> None:
    policy = Scripted(*[0] * 6)
    pacing = Pacing(policy, depth=0)
    pacing.add(row("a"))
    for number in range(6):
        pacing.before(["a"], slots=1)
        if number == 2:
            pacing.disturb(2)
        pacing.after([emitted("a", 1, 0)])
    assert [report.seconds is None for report in policy.reports] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]


def test_a_step_after_which_drafting_changes_is_told_as_one() -> None:
    """Before a step that drafts again the head catches up, which delays news of the one before."""
    policy = Scripted(0, 0, 0, 2, 2, 2, 2)
    pacing = Pacing(policy, depth=2)
    pacing.add(row("a"))
    for drafted in (None, 0, 0, 0, 0, 2, 2):
        pacing.before(["a"], slots=1)
        pacing.after([] if drafted is None else [emitted("a", 1, drafted)])
    told = [(report.drafted, report.turns) for report in policy.reports]
    assert told == [(0, False), (0, False), (0, True), (2, False), (2, False), (2, False)]
    assert all(report.seconds is not None for report in policy.reports)
