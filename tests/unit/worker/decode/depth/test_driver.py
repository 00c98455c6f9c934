"""Before each step a policy is asked; after it, it is told what the step before came to."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.driver import DepthDriver
from omlx_worker.decode.depth.policies import make_policy
from omlx_worker.decode.depth.records import Decision, RowView, StepReport
from omlx_worker.decode.row import DecodeRow
from omlx_worker.engine.row import Emission, Row, Sampling


class Scripted:
    """A policy that drafts as told and keeps what it hears."""

    def __init__(self, *depths: int) -> None:
        self._depths = list(depths)
        self.seen: list[Sequence[RowView]] = []
        self.reports: list[StepReport] = []

    def choose(
        self,
        rows: Sequence[RowView],
        slots: int,
        coming: int = 0,
    ) -> Decision:
        self.seen.append(rows)
        depth = self._depths.pop(0)
        depths = {row.row_id: min(depth, row.limit) for row in rows if min(depth, row.limit)}
        return Decision(depth, depths, f"depth {depth}")

    def observe(self, report: StepReport) -> None:
        self.reports.append(report)


def row(name: str, depth: int | None = None, prompt: int = 5) -> DecodeRow:
    return DecodeRow(Row(name, [1] * prompt, 50, Sampling(), depth=depth))


def emitted(name: str, tokens: int, drafted: int) -> Emission:
    return Emission(name, [7] * tokens, "x", drafted=drafted, accepted=tokens - 1)


def test_every_row_is_named_and_keeps_its_own_limit() -> None:
    driver = DepthDriver(Scripted(3, 3), depth=4)
    rows = [row("free"), row("none", depth=0), row("one", depth=1), row("many", depth=9)]
    depths = driver.before(rows, slots=4)

    assert depths == {"free": 3, "none": 0, "one": 1, "many": 3}


def run(driver: DepthDriver, drafted: Sequence[int | None]) -> list[bool]:
    """Steps of one row, each with the drafts that the one read meanwhile judged; None reads none.

    Returns:
        After each, whether the depth changed.
    """
    a, changed = row("a"), []
    for judged in drafted:
        driver.before([a], slots=1)
        emissions = [] if judged is None else [emitted("a", judged + 1, judged)]
        driver.after(emissions, 0.01)
        a.tokens += [token for emission in emissions for token in emission.tokens]
        changed.append(driver.changes_depth)
    return changed


def test_a_report_is_of_the_step_that_was_read() -> None:
    policy = Scripted(2, 2, 2)
    run(DepthDriver(policy, depth=2), [None, 0, 2])

    assert [report.depth for report in policy.reports] == [0, 2]
    assert policy.reports[1].emissions == [emitted("a", 3, 2)]
    assert [views[0].context for views in policy.seen] == [5, 5, 6]


def test_a_step_around_which_the_depth_changes_has_no_time() -> None:
    policy = Scripted(2, 2, 2, 0, 0, 0)
    changed = run(DepthDriver(policy, depth=2), [None, 0, 2, 2, 2, 0])

    assert changed == [False, True, False, True, True, False]
    assert [report.seconds for report in policy.reports] == [None, 0.01, None, None, 0.01]


def test_the_time_of_a_mixed_step_is_not_reported() -> None:
    policy = Scripted(1, 1)
    driver = DepthDriver(policy, depth=1)
    for seconds in (0.01, None):
        driver.before([row("a")], slots=1)
        driver.after([emitted("a", 2, 1)], seconds)
    assert policy.reports[-1].seconds is None


def test_modes_without_drafts_never_ask_for_any() -> None:
    for policy in (make_policy("batched", 4), make_policy("auto", 0), make_policy("mtp", 0)):
        driver = DepthDriver(policy, depth=0)
        assert driver.before([row("a")], slots=1) == {"a": 0}


def test_a_step_is_told_with_the_context_of_the_rows_that_decoded() -> None:
    policy = Scripted(0, 0)
    driver = DepthDriver(policy, depth=0)
    rows = [row("short", prompt=100), row("shorter", prompt=50)]
    for _ in range(2):
        driver.before(rows, slots=2)
        driver.after([emitted("short", 1, 0)], 0.01)
        rows[0].tokens.append(7)
    assert [report.context for report in policy.reports] == [100, 101]
