"""Rows as a depth policy sees them, and steps to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from omlx_worker.decode.depth.acceptance import RowView
from omlx_worker.decode.depth.policies import DepthPolicy
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.row import Source


def outcome(row_id: str, drafted: int, accepted: int, source: Source = "model") -> Emission:
    """An emission as far as a policy reads it."""
    return Emission(row_id, [], "", drafted=drafted, accepted=accepted, source=source)


def rows(*limits: int) -> list[RowView]:
    return [RowView(f"row{n}", limit, 100) for n, limit in enumerate(limits)]


def feed(
    policy: DepthPolicy,
    steps: int,
    seconds: Sequence[float],
    accepted: Sequence[int],
    limits: Sequence[int] | None = None,
    *,
    own: int = 8,
    noise: Sequence[float] = (1.0,),
    timed: bool = True,
) -> list[int]:
    """Drive a policy with an engine of fixed step times, by depth, and acceptance, by row.

    Args:
        own: drafts that the model makes itself; a deeper window has looked-up drafts alone.
        noise: factors of the step times, in turn.

    Returns:
        The depths chosen.
    """
    batch = rows(*(limits or [3] * len(accepted)))
    chosen = [0, 0]
    for step in range(steps):
        depth, _ = policy.choose(batch, len(batch))
        chosen.append(min(depth, max(row.limit for row in batch)))
        before, window, drafted = chosen[-3:]
        outcomes = [
            outcome(row.row_id, k, min(k, most), "model" if k <= own else "lookup")
            for row, most in zip(batch, accepted, strict=True)
            for k in [min(window, row.limit)]
        ]
        took = seconds[window] * noise[step % len(noise)]
        steady = timed and before == window == drafted
        policy.observe(outcomes, window, took if steady else None)
    return chosen[2:]
