"""Rows of like length sit side by side, in few shapes, and no row holds much more than it needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.engine.caches.layout import (
    FIRST_LIMIT,
    MAX_GROUPS,
    MIN_CAPACITY,
    Group,
    Layout,
    anew,
    capacity_for,
    excess,
    packed,
    seat,
    slots_of,
)

lengths = st.lists(st.integers(0, 200_000), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("positions", "capacity"),
    [
        (0, 256),
        (256, 256),
        (257, 512),
        (1500, 2048),
        (2048, 2048),
        (2049, 2304),
        (4096, 4096),
        (4097, 4608),
        (8193, 9216),
        (32_768, 32_768),
    ],
)
def test_capacities_double_and_then_grow_by_eighths(positions: int, capacity: int) -> None:
    assert capacity_for(positions) == capacity


@given(st.integers(FIRST_LIMIT + 1, 1 << 20))
def test_above_two_thousand_positions_no_more_than_an_eighth_is_wasted(positions: int) -> None:
    assert positions <= capacity_for(positions) <= positions * 9 / 8


def test_rows_below_the_first_limit_share_one_body() -> None:
    assert anew([3, 900, 40, 2048, 1]) == (Group(8, 2048, FIRST_LIMIT),)


def test_a_long_row_among_short_ones_has_a_body_of_its_own() -> None:
    assert anew([30, 20_000, 200]) == (Group(2, 256, 2048), Group(1, 20_480, 32_768))


def test_of_many_classes_the_shortest_are_merged() -> None:
    assert anew([30, 5000, 20_000, 90_000]) == (
        Group(2, 5120, 8192),
        Group(1, 20_480, 32_768),
        Group(1, 90_112, 131_072),
    )


def test_a_row_that_comes_takes_a_free_slot_of_its_class_and_moves_nobody() -> None:
    layout = (Group(4, 256, 2048), Group(2, 16_384, 32_768))

    assert seat(layout, [(1, 100), (4, 16_000), (None, 200)]) == (layout, [1, 4, 0])
    assert seat(layout, [(1, 100), (4, 16_000), (None, 9000)]) == (layout, [1, 4, 5])


def test_a_body_grows_where_its_rows_sit() -> None:
    layout = (Group(2, 256, 2048), Group(1, 10_240, 32_768))

    assert seat(layout, [(0, 300), (2, 10_241)]) == (
        (Group(2, 512, 2048), Group(1, 11_264, 32_768)),
        [0, 2],
    )


def test_a_row_that_outgrows_its_class_moves_to_the_next() -> None:
    layout = (Group(4, 2048, 2048),)

    assert seat(layout, [(0, 10), (1, 2049), (2, 20), (3, 30)]) == (
        (Group(4, 256, 2048), Group(1, 2304, 8192)),
        [0, 4, 1, 2],
    )


def test_a_batch_is_too_large_by_what_its_worst_group_has_more_than_it_needs() -> None:
    layout = (Group(4, 1024, 2048), Group(2, 16_384, 32_768))
    full = [(0, 900), (1, 9), (2, 9), (4, 15_000), (5, 9000)]

    assert excess(layout, full) == 0
    assert excess(layout, full[:-1]) == 1
    assert excess(layout, [(0, 500), *full[1:]]) == 1
    assert excess(layout, [(0, 900), *full[3:]]) == 3
    assert excess(layout, [(0, 9), *full[1:]]) == 3
    assert excess(layout, full[:3]) == 2


def holds(layout: Layout, slots: list[int], needs: list[int]) -> bool:
    sizes = [(group, slot) for group in layout for slot in range(group.slots)]
    return all(
        need <= sizes[slot][0].capacity and need <= sizes[slot][0].limit
        for slot, need in zip(slots, needs, strict=True)
    )


@given(lengths, lengths, st.randoms())
def test_every_row_has_a_slot_of_its_own_that_holds_it(
    there: list[int], coming: list[int], rng: object
) -> None:
    layout, slots = packed([(None, need) for need in there])
    assert holds(layout, slots, there)

    for need in coming:
        # Whoever is there grows a little; sometimes one leaves.
        there = [have + rng.randrange(300) for have in there]  # type: ignore[attr-defined]
        if len(there) > 1 and rng.random() < 0.4:  # type: ignore[attr-defined]
            there.pop(0)
            slots.pop(0)
        rows = [*zip(slots, there, strict=True), (None, need)]
        layout, slots = seat(layout, rows)
        there.append(need)

        assert holds(layout, slots, there)
        assert len(set(slots)) == len(slots) <= slots_of(layout)
        assert len(layout) <= MAX_GROUPS
        assert all(group.slots & (group.slots - 1) == 0 for group in layout)
        assert all(group.capacity >= MIN_CAPACITY for group in layout)


@given(lengths)
def test_a_packed_batch_is_not_too_large(needs: list[int]) -> None:
    layout, slots = packed([(None, need) for need in needs])

    assert excess(layout, list(zip(slots, needs, strict=True))) == 0
