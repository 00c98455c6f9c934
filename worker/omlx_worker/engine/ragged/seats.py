"""Who sits in which slot of a batch, and the buffers beneath.

Rows take a slot when they come and free it when they go. Slots move only between steps and with
the pipeline drained: when a row comes for whom there is no slot, when one has outgrown its
group at a fold, and when the batch has been too large for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omlx_worker.engine.interface import Row, Sampling
from omlx_worker.engine.models.ragged_model import RaggedModel
from omlx_worker.engine.ragged.buffers import Buffers
from omlx_worker.engine.ragged.layout import Layout, Seated, excess, packed, seat, slots_of
from omlx_worker.engine.ragged.snapshot import Snapshot

SHRINK_AFTER = 32
"""Steps with twice the slots or capacity that rows need before the batch is rearranged, so that it
does not flap; with eight times as many, a seventh of that."""


@dataclass(slots=True)
class Slot:
    """What the host knows of a row.

    Attributes:
        cursor: at most this; exact once every dispatched step is read.
        remaining: tokens that may still be wanted, at most this; likewise.
    """

    row: Row
    body_length: int
    cursor: int
    remaining: int
    left: bool = False

    @property
    def offset(self) -> int:
        """Positions of its tail that are filled, at most."""
        return self.cursor - self.body_length


class Seats:
    """The slots of a batch.

    Attributes:
        slots: the row of each, None for an empty one.
        changed: whether rows have come, gone or moved; for the caller to reset.
        drains: how many times the pipeline was drained.
    """

    def __init__(self, model: RaggedModel) -> None:
        self.slots: list[Slot | None] = []
        self.buffers = Buffers(model)
        self.changed = False
        self.drains = 0
        self._excess = 0
        self._slack = 0

    @property
    def taken(self) -> list[tuple[int, Slot]]:
        return [(index, slot) for index, slot in enumerate(self.slots) if slot is not None]

    def find(self, row_id: str) -> int | None:
        """The slot that a row is in."""
        return next((index for index, slot in self.taken if slot.row.row_id == row_id), None)

    def at(self, index: int) -> Slot:
        """The slot of a row that is there."""
        slot = self.slots[index]
        assert slot is not None
        return slot

    def drain(self) -> None:
        """Wait for the step in flight, so that nothing but the caches holds their buffers."""
        if self.slots:
            self.drains += 1
            self.buffers.settle()

    def place(self, slot: Slot) -> int:
        """Find or make a free slot, and return its index; its arrays are yet to be written."""
        self.drain()
        rows: list[tuple[int | None, int]] = [(i, s.body_length) for i, s in self.taken]
        rows.append((None, slot.body_length))
        layout, indices = seat(self.buffers.layout, rows)
        self._arrange(layout, indices, rows)
        self.slots[indices[-1]] = slot
        self._weigh()
        return indices[-1]

    def take_out(self, index: int) -> tuple[Slot, Snapshot]:
        """Copy a row out of its slot and free that."""
        slot = self.at(index)
        self.drain()
        useless = _useless(slot.row.sampling)
        snapshot, slot.body_length = self.buffers.read(index, slot.body_length, useless)
        return self.free(index), snapshot

    def free(self, index: int) -> Slot:
        """Free a slot, and let go of every buffer with the last of them; returns the row's."""
        slot = self.at(index)
        self.slots[index] = None
        self.changed = True
        if self.taken:
            self.buffers.vacate(index)
            self._weigh()
        else:
            self.slots, self._slack, self._excess = [], 0, 0
            self.buffers.clear()
        return slot

    def fold(self) -> None:
        """Move every tail to its body and start the tails afresh."""
        self.drain()
        cursors: list[int] = self.buffers.state["cursors"].tolist()  # type: ignore[assignment]
        ends = {slot.row.row_id: cursors[index] for index, slot in self.taken}
        rows = [(index, cursors[index]) for index, _ in self.taken]
        self._arrange(*seat(self.buffers.layout, rows), rows)
        self.buffers.fold([(i, s.body_length, ends[s.row.row_id]) for i, s in self.taken])
        for _, slot in self.taken:
            slot.body_length = ends[slot.row.row_id]
        self._weigh()

    def compact(self, *, at_once: bool = False) -> None:
        """Rearrange the batch once it has been too large for a while; once a step.

        Args:
            at_once: however short that while.
        """
        self._slack = self._slack + self._excess if self._excess else 0
        if self._excess and (at_once or self._slack >= SHRINK_AFTER):
            self.drain()
            rows = self._lengths()
            self._arrange(*packed(rows), rows)
            self._slack = 0
            self._weigh()

    def _arrange(self, layout: Layout, indices: Sequence[int], rows: Seated) -> None:
        """Take up a layout, in which these rows sit in these slots."""
        stays = all(old in (None, new) for (old, _), new in zip(rows, indices, strict=True))
        if layout == self.buffers.layout and stays:
            return
        moves: list[int | None] = [None] * slots_of(layout)
        for (old, _), new in zip(rows, indices, strict=True):
            moves[new] = old
        self.buffers.arrange(layout, moves)
        self.slots = [None if old is None else self.slots[old] for old in moves]
        self.changed = True

    def _weigh(self) -> None:
        self._excess = excess(self.buffers.layout, self._lengths())

    def _lengths(self) -> list[tuple[int | None, int]]:
        """Every row's slot and its length, of which part is in the tail still."""
        return [(index, slot.cursor) for index, slot in self.taken]


def _useless(sampling: Sampling) -> list[str]:
    """The arrays over the vocabulary that a row does not need."""
    needs = {"counts": sampling.penalises, "weights": sampling.ratio and sampling.temperature > 0}
    return [name for name, needed in needs.items() if not needed]
