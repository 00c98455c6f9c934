"""The slots of a batch: which row has which slot, and when the layout changes.

A row takes a slot when it joins and frees it when it leaves. Slots move only between steps, with
the pipeline drained: when a joining row finds none, when a row has outgrown its group at a fold,
and when the batch has been too large for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.engine.caches.layout import Layout, Seated, excess, packed, seat, slots_of, unmoved
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.buffers import Buffers, Snapshot
from omlx_worker.engine.ragged.masks import Matcher
from omlx_worker.engine.rows.row import Row, Sampling

SHRINK_AFTER = 32
"""Steps with twice the slots or capacity that rows need before the batch shrinks (hysteresis).
A larger excess shrinks sooner: eight times the need after a seventh of these steps."""


@dataclass(slots=True)
class Slot:
    """A row in the batch, as far as the host knows it.

    Attributes:
        tokens: its history, as far as the host has read it.
        cursor: tokens in the cache, at most; exact once every dispatched step is read.
        remaining: tokens still wanted, at most; likewise.
        accepted: drafts of the last step that was read.
        matcher: of a constrained row; knows the tokens that the host has read.
    """

    row: Row
    tokens: list[int]
    body_length: int
    cursor: int
    remaining: int
    accepted: int = 0
    left: bool = False
    matcher: Matcher | None = None

    @property
    def offset(self) -> int:
        """Filled positions of its tail, at most."""
        return self.cursor - self.body_length


class Slots:
    """The slots and the arrays behind them.

    Attributes:
        rows: the row of each slot, None for an empty one.
        changed: whether rows have joined, left or moved; the caller resets it.
        drains: how many times the pipeline was drained.
    """

    def __init__(self, model: RaggedModel, *, looks_up: bool = False) -> None:
        self.rows: list[Slot | None] = []
        self.buffers = Buffers(model, looks_up=looks_up)
        self.changed = False
        self.drains = 0
        self._excess = 0
        self._slack = 0

    @property
    def taken(self) -> list[tuple[int, Slot]]:
        return [(index, slot) for index, slot in enumerate(self.rows) if slot is not None]

    def find(self, row_id: str) -> int | None:
        """The slot of a row; None if it has none."""
        return next((index for index, slot in self.taken if slot.row.row_id == row_id), None)

    def at(self, index: int) -> Slot:
        """The row of a taken slot."""
        slot = self.rows[index]
        assert slot is not None
        return slot

    def place(self, joining: Sequence[Slot]) -> list[int]:
        """Find or make free slots and return their indices; the caller writes their arrays."""
        self.drain()
        rows: list[tuple[int | None, int]] = [(i, s.body_length) for i, s in self.taken]
        rows += [(None, slot.body_length) for slot in joining]
        layout, indices = seat(self.buffers.layout, rows)
        self._arrange(layout, indices, rows)
        found = indices[-len(joining) :]
        for index, slot in zip(found, joining, strict=True):
            self.rows[index] = slot
        self._weigh()
        return found

    def take_out(self, index: int) -> tuple[Slot, Snapshot]:
        """Copy a row out of its slot and free the slot."""
        slot = self.at(index)
        self.drain()
        useless = _useless(slot.row.sampling)
        snapshot, slot.body_length = self.buffers.read(index, slot.body_length, useless)
        return self.free(index), snapshot

    def free(self, index: int) -> Slot:
        """Free a slot and return its row; with the last row all buffers go."""
        slot = self.at(index)
        self.rows[index] = None
        self.changed = True
        if self.taken:
            self.buffers.vacate(index)
            self._weigh()
        else:
            self.rows, self._slack, self._excess = [], 0, 0
            self.buffers.clear()
        return slot

    def fold(self) -> None:
        """Move every tail to its body."""
        self.drain()
        cursors: list[int] = self.buffers.state["cursors"].tolist()  # type: ignore[assignment]
        rows = [(index, cursors[index]) for index, _ in self.taken]
        ends = {slot.row.row_id: cursors[index] for index, slot in self.taken}
        self._arrange(*seat(self.buffers.layout, rows), rows)
        self.buffers.fold([(i, s.body_length, ends[s.row.row_id]) for i, s in self.taken])
        for _, slot in self.taken:
            slot.body_length = ends[slot.row.row_id]
        self._weigh()

    def compact(self, *, at_once: bool = False) -> None:
        """Shrink the batch if it has been too large for a while; called once a step.

        Args:
            at_once: do not wait.
        """
        self._slack = self._slack + self._excess if self._excess else 0
        if self._excess and (at_once or self._slack >= SHRINK_AFTER):
            self.drain()
            rows = self._lengths()
            self._arrange(*packed(rows), rows)
            self._slack = 0
            self._weigh()

    def drain(self) -> None:
        """Wait for the step in flight, so that only the caches hold their buffers."""
        if self.rows:
            self.drains += 1
            self.buffers.settle()

    def _arrange(self, layout: Layout, indices: Sequence[int], rows: Seated) -> None:
        """Change to a layout in which these rows have these slots."""
        moves: list[int | None] = [None] * slots_of(layout)
        for (old, _), new in zip(rows, indices, strict=True):
            moves[new] = old
        if layout == self.buffers.layout and unmoved(moves, len(moves)):
            return
        self.buffers.arrange(layout, moves)
        self.rows = [None if old is None else self.rows[old] for old in moves]
        self.changed = True

    def _weigh(self) -> None:
        self._excess = excess(self.buffers.layout, self._lengths())

    def _lengths(self) -> list[tuple[int | None, int]]:
        """Every row's slot and its length, tail included."""
        return [(index, slot.cursor) for index, slot in self.taken]


def _useless(sampling: Sampling) -> list[str]:
    """The arrays over the vocabulary that a row does not need."""
    needs = {"counts": sampling.penalises, "weights": sampling.ratio and sampling.temperature > 0}
    return [name for name, needed in needs.items() if not needed]
