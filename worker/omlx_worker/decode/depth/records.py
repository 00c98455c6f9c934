"""What the service and a depth policy say to each other, once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RowView:
    """What a policy sees of a row that decodes.

    Attributes:
        limit: the most drafts a step that this row may have; 0 where it must not draft.
        context: tokens in its cache.
    """

    row_id: str
    limit: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """How deep to draft in the step that is dispatched next, for the one after it to judge.

    Attributes:
        depth: drafts in the window of that later step: the most that any row gets.
        depths: drafts for each row; rows that get none are not named.
        reason: why, in words; it changes only when the decision does.
        passing: whether this holds for a few steps whatever comes of it: a depth is measured, or
            rows are about to join.
    """

    depth: int
    depths: dict[str, int]
    reason: str
    passing: bool = False


class Outcome(NamedTuple):
    """What a step's verification did for one row."""

    row_id: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step whose outcome has been read.

    Attributes:
        seconds: from the end of the step before it to its own; None where anything else ran in
            between (a prefill, a join), which makes the time say nothing.
        turns: whether the step dispatched in that time drafts otherwise than this one: to dispatch
            it, the head may have had to catch up, so that the time says nothing of this step.
        rows: slots of the batch in that step, or the rows in it where slots are not known.
        depth: drafts in the window that it verified.
        drafted: drafts that it made for the next one; None means as many as it verified.
        context: tokens in the cache of its longest row.
        outcomes: one a row.
    """

    seconds: float | None
    rows: int
    depth: int
    context: int = 0
    outcomes: Sequence[Outcome] = field(default=())
    drafted: int | None = None
    turns: bool = False

    @property
    def changes_depth(self) -> bool:
        """Whether the depth changed in this step or the next: it took what neither depth takes."""
        return self.turns or self.drafted not in (None, self.depth)
