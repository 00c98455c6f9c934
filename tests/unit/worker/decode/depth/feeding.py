"""Rows as a depth policy sees them, and steps to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.fixed import DepthPolicy, Outcome, RowView, StepReport


def rows(*limits: int) -> list[RowView]:
    return [RowView(f"row{n}", limit, 100) for n, limit in enumerate(limits)]


def feed(
    policy: DepthPolicy,
    steps: int,
    seconds: Sequence[float],
    accepted: dict[str, int],
    limits: Sequence[int] = (3, 3),
    catch_up: float = 0.0,
) -> list[dict[str, int]]:
    """Drive a policy with an engine that always takes as long and accepts as many.

    Args:
        catch_up: seconds that a step takes longer that drafts when the one before it did not.
    """
    made, pending = [], dict[str, int]()
    for _ in range(steps):
        batch = rows(*limits)
        depths = policy.choose(batch).depths
        window = max(pending.values(), default=0)
        outcomes = [
            Outcome(row.row_id, k, min(k, accepted[row.row_id]))
            for row in batch
            for k in [pending.get(row.row_id, 0)]
        ]
        drafted = max(depths.values(), default=0)
        took = seconds[window] + (catch_up if drafted and not window else 0.0)
        policy.observe(StepReport(took, len(batch), window, 100, outcomes, drafted))
        pending = depths
        made.append(depths)
    return made
