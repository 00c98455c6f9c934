"""Before each step a policy is asked; after it, it is told what the step before came to."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth_driver import DepthDriver, make_policy
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row


class Scripted:
    """A policy that drafts as told and keeps what it hears."""

    def __init__(self, *depths: int) -> None:
        self._depths = list(depths)
        self.seen: list[Sequence[RowView]] = []
        self.reports: list[tuple[Sequence[Emission], int, float | None]] = []

    def choose(self, rows: Sequence[RowView], slots: int) -> tuple[int, str]:
        self.seen.append(rows)
        depth = self._depths.pop(0)
        return depth, f"depth {depth}"

    def observe(self, emissions: Sequence[Emission], depth: int, seconds: float | None) -> None:
        self.reports.append((emissions, depth, seconds))


def row(name: str, depth: int | None = None, prompt: int = 5) -> Row:
    return Row(RowRequest(name, [1] * prompt, 50, Sampling(), depth=depth))


def emitted(name: str, tokens: int, drafted: int) -> Emission:
    counts = {"drafted": drafted, "accepted": tokens - 1, "step_depth": drafted}
    return Emission(name, [7] * tokens, "x", **counts)


def test_a_step_is_as_deep_as_the_policy_says_and_some_row_allows() -> None:
    driver = DepthDriver(Scripted(3, 3))

    assert driver.before([row("free"), row("none", depth=0)], slots=4) == 3
    assert driver.depth == 3
    driver.before([row("none", depth=0), row("one", depth=1)], slots=4)
    assert driver.depth == 1


def run(driver: DepthDriver, drafted: Sequence[int | None]) -> None:
    """Steps of one row, each with the drafts that the one read meanwhile judged, if one was."""
    a = row("a")
    for judged in drafted:
        driver.before([a], slots=1)
        emissions = [] if judged is None else [emitted("a", judged + 1, judged)]
        driver.after(emissions, 0.01)
        a.tokens += [token for emission in emissions for token in emission.tokens]


def test_a_report_is_of_the_step_that_was_read() -> None:
    policy = Scripted(2, 2, 2)
    run(DepthDriver(policy), [None, 0, 2])

    assert [depth for _, depth, _ in policy.reports] == [0, 2]
    assert policy.reports[1][0] == [emitted("a", 3, 2)]
    assert [views[0].context for views in policy.seen] == [5, 5, 6]


def test_a_step_around_which_the_depth_changes_has_no_time() -> None:
    policy = Scripted(2, 2, 2, 0, 0, 0)
    run(DepthDriver(policy), [None, 0, 2, 2, 2, 0])

    assert [seconds for _, _, seconds in policy.reports] == [None, 0.01, None, None, 0.01]


def test_the_time_of_a_mixed_step_is_not_reported() -> None:
    policy = Scripted(1, 1)
    driver = DepthDriver(policy)
    for seconds in (0.01, None):
        driver.before([row("a")], slots=1)
        driver.after([emitted("a", 2, 1)], seconds)
    assert policy.reports[-1][2] is None


def test_modes_without_drafts_never_ask_for_any() -> None:
    for mode, depth in (("batched", 4), ("auto", 0), ("mtp", 0)):
        driver = DepthDriver(make_policy(mode, depth, depth))
        assert driver.before([row("a")], slots=1) == 0


def test_the_depth_in_use_is_the_one_that_rows_may_have() -> None:
    driver = DepthDriver(Scripted(3))
    driver.before([row("one", depth=1), row("none", depth=0)], slots=2)
    assert (driver.depth, driver.reason) == (1, "depth 3")
