"""No layout that a batch comes to is larger than those that were foreseen."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from omlx_worker.engine.caches.layout import (
    Group,
    Layout,
    anew,
    excess,
    grown,
    packed,
    positions_of,
    reachable,
    seat,
    slots_of,
)


@dataclass
class _Row:
    slot: int
    need: int
    longest: int


@dataclass
class Life:
    """A batch from its first row on, and the most that was foreseen for the rows it has."""

    layout: Layout = ()
    rows: list[_Row] = field(default_factory=list)
    foreseen: list[Layout] = field(default_factory=list)

    def join(self, need: int, longest: int) -> None:
        needs = [*(row.longest for row in self.rows), longest]
        self.foreseen = [*reachable(needs), grown(self.layout, needs)]
        self.layout, slots = seat(self.layout, [*self._seated, (None, need)])
        self.rows.append(_Row(slots[-1], need, longest))
        self._sit(slots)

    def grow(self, by: list[int]) -> None:
        for row, more in zip(self.rows, by, strict=False):
            row.need = min(row.longest, row.need + more)
        if self.rows:
            self.layout, slots = seat(self.layout, self._seated)
            self._sit(slots)

    def leave(self, place: int) -> None:
        if place < len(self.rows):
            del self.rows[place]
        if not self.rows:
            self.layout = ()

    def compact(self) -> None:
        if self.rows and excess(self.layout, self._seated):
            self.layout, slots = packed(self._seated)
            self._sit(slots)

    @property
    def _seated(self) -> list[tuple[int | None, int]]:
        return [(row.slot, row.need) for row in self.rows]

    def _sit(self, slots: list[int]) -> None:
        for row, slot in zip(self.rows, slots, strict=True):
            row.slot = slot


lengths = st.one_of(
    st.sampled_from([100, 1000, 2048, 2300, 4500, 8000, 10_000, 30_000, 100_000]),
    st.integers(0, 150_000),
)
joins = st.tuples(st.just("join"), lengths, lengths)
growths = st.tuples(st.just("grow"), st.lists(lengths, min_size=1, max_size=12))
leaves = st.tuples(st.just("leave"), st.integers(0, 9))
compactions = st.tuples(st.just("compact"))


DRIFTED = [
    *[("join", 4200, 5000)] * 5,
    ("join", 8000, 8000),
    ("join", 10_000, 30_000),
    ("leave", 5),
    ("join", 4200, 5000),
    ("grow", [0, 0, 0, 0, 0, 20_000]),
]
"""Slots as long as the row that left stay as long, while another group grows."""


@example(DRIFTED)
@given(st.lists(st.one_of(joins, joins, growths, growths, leaves, compactions), max_size=40))
def test_however_rows_join_grow_and_leave_no_layout_is_larger_than_foreseen(moves: list) -> None:  # type: ignore[type-arg]
    life = Life()
    for name, *arguments in moves:
        if name == "join":
            first, second = arguments
            arguments = [min(first, second), max(first, second)]
        getattr(life, name)(*arguments)

        if life.rows:
            assert any(
                positions_of(life.layout) <= positions_of(layout)
                and slots_of(life.layout) <= slots_of(layout)
                for layout in life.foreseen
            )


def test_slots_of_a_long_row_that_left_count_while_others_grow() -> None:
    layout = (Group(8, 8192, 8192), Group(1, 10_240, 32_768))

    assert grown(layout, [5000] * 5 + [30_000]) == (
        Group(8, 8192, 8192),
        Group(1, 30_720, 32_768),
    )


def test_rows_of_one_length_may_pass_the_limit_of_their_class_one_after_the_other() -> None:
    straddling = anew([2048] * 3 + [2300] * 5)

    assert straddling == (Group(4, 2048, 2048), Group(8, 2304, 8192))
    assert positions_of(straddling) > positions_of(anew([2300] * 8))
    assert straddling in reachable([2300] * 8)


def test_rows_that_all_stay_short_are_foreseen_as_one_group() -> None:
    assert reachable([900] * 5) == ((Group(8, 1024, 2048),),)
