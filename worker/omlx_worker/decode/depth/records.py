"""What the depth driver and a policy tell each other, once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.engine.row import Emission


def slots_for(rows: int) -> int:
    """The slots that a batch's costs are kept under: its own, rounded up to a power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def bucket_of(tokens: int) -> int:
    """0 up to 1,024 tokens, 1 up to 2,048, 2 up to 4,096 and so on."""
    return (max(tokens - 1, 0) // 1024).bit_length()


@dataclass(frozen=True, slots=True)
class RowView:
    """What a policy sees of a row that decodes.

    Attributes:
        limit: the most drafts a step that this row may have; 0 where it must not draft.
        context: tokens in its cache.
        constrained: whether a grammar may force drafts on it.
    """

    row_id: str
    limit: int
    context: int = 0
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """How deep to draft in the step that is dispatched next, for the one after it to judge.

    Attributes:
        depth: drafts in the window of that later step: the most that any row gets.
        depths: drafts for each row; rows without drafts are left out.
        reason: why, in words.
    """

    depth: int
    depths: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step whose outcome has been read.

    Attributes:
        seconds: from the end of the step before it to its own; None if anything but a step at this
            depth took time: a prompt was read, a row joined, or the depth changed.
        slots: of the batch in that step.
        depth: drafts in the window that it verified.
        context: tokens in the cache of its longest row.
        emissions: one a row.
    """

    seconds: float | None
    slots: int
    depth: int
    context: int = 0
    emissions: Sequence[Emission] = ()
