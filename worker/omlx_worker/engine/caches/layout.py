"""Which slots of a batch share a body capacity: rows of similar length side by side.

Attention reads the body of every slot to its capacity, so one long row must not set the capacity
of all. Slots form at most `MAX_GROUPS` groups, shortest first. A row belongs to the group of its
length class. Classes are four times apart; all lengths below `FIRST_LIMIT` are one class, because
a shared body costs next to nothing there. The slots of a group are a power of two and capacities
repeat, so a batch meets few shapes.

Capacities double at first. Above `FIRST_LIMIT` they grow by eighths of the power of two below, so
a long row holds at most an eighth more than it needs. A growing row copies its body once an eighth.
The smallest eighth is 256 tokens, and every step reads the body once, so the copies are less than a
hundredth of what the steps read.

Pure Python: positions and slots, no arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

MIN_CAPACITY = 256
"""Positions of the smallest body."""

FIRST_LIMIT = 2048
"""Longest row of the first length class."""

MAX_GROUPS = 3


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring slots with bodies of one capacity.

    Attributes:
        limit: the longest row of its length class, in positions.
    """

    slots: int
    capacity: int
    limit: int


Layout = tuple[Group, ...]
"""Groups in the order of their slots."""

Seated = Sequence[tuple[int | None, int]]
"""Rows: the slot of each, None if it is joining, and the body positions that it needs."""


def capacity_for(positions: int) -> int:
    """The smallest body capacity that holds ``positions``."""
    if positions <= FIRST_LIMIT:
        return max(MIN_CAPACITY, power_of_two(positions))
    step = power_of_two(positions) // 16
    return -(-positions // step) * step


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``."""
    return 1 << max(0, count - 1).bit_length()


def slots_of(layout: Layout) -> int:
    return sum(group.slots for group in layout)


def unmoved(moves: Sequence[int | None], size: int) -> bool:
    """Whether every row of ``size`` slots keeps its own; ``moves`` names the row of each slot."""
    return len(moves) == size and all(old in (None, slot) for slot, old in enumerate(moves))


def positions_of(layout: Layout) -> int:
    return sum(group.slots * group.capacity for group in layout)


def anew(needs: Sequence[int]) -> Layout:
    """The layout for rows with these needs in an empty batch."""
    groups: list[Group] = []
    below = -1
    for limit in sorted({_limit_for(need) for need in needs})[-MAX_GROUPS:]:
        inside = [need for need in needs if below < need <= limit]
        groups.append(Group(power_of_two(len(inside)), capacity_for(max(inside)), limit))
        below = limit
    return tuple(groups)


def seat(layout: Layout, rows: Seated) -> tuple[Layout, list[int]]:
    """Find a slot for every row, its own if possible; capacities grow as needed.

    Returns:
        The layout, with one slot or more in every group, and the slot of each row.
    """
    slots = _kept(layout, rows)
    return packed(rows) if slots is None else (_grown(layout, slots, rows), slots)


def packed(rows: Seated) -> tuple[Layout, list[int]]:
    """The smallest layout, and the slot of each row in it, in their present order."""
    layout = anew([need for _, need in rows])
    starts = [slots_of(layout[:index]) for index in range(len(layout))]
    slots = [0] * len(rows)
    for row in sorted(range(len(rows)), key=lambda row: (rows[row][0] is None, rows[row][0])):
        group = _group_for(layout, rows[row][1])
        assert group is not None
        slots[row] = starts[group]
        starts[group] += 1
    return layout, slots


def reachable(needs: Sequence[int]) -> tuple[Layout, ...]:
    """The largest layouts, one for each number of slots, that rows may be packed into.

    Rows grow to these needs and leave in any order, so each may be in any class up to its last.
    """
    limits = [FIRST_LIMIT]
    while limits[0] < max(needs, default=0):
        limits.insert(0, 4 * limits[0])
    return _reachable(tuple(limits), tuple(sorted(needs, reverse=True)))


def grown(layout: Layout, needs: Sequence[int]) -> Layout:
    """The largest layout that this one may become while it holds rows with these needs."""
    longest = max(needs, default=0)
    return tuple(
        replace(group, capacity=max(group.capacity, capacity_for(min(longest, group.limit))))
        for group in layout
    )


def fixed(slots: int, capacity: int, rows: Seated) -> tuple[Layout, list[int]]:
    """One group of ``slots``, all of the longest row's capacity, or of this one if that is more.

    Returns:
        The layout, and the slot of each row: its own, or a free one.
    """
    taken = {slot for slot, _ in rows}
    free = (slot for slot in range(slots) if slot not in taken)
    seats = [next(free) if slot is None else slot for slot, _ in rows]
    capacity = max([capacity, *(capacity_for(need) for _, need in rows)])
    return (Group(slots, capacity, capacity),), seats


def excess(layout: Layout, rows: Seated) -> int:
    """How much too large a layout is; 0 if no group has twice the slots or capacity it needs.

    Otherwise the largest factor of any group, less one.
    """
    needs: list[list[int]] = [[] for _ in layout]
    for slot, need in rows:
        assert slot is not None
        needs[_group_at(layout, slot)].append(need)
    found = (_excess(group, inside) for group, inside in zip(layout, needs, strict=True))
    return max(found, default=0)


@lru_cache(maxsize=256)
def _reachable(limits: tuple[int, ...], needs: tuple[int, ...]) -> tuple[Layout, ...]:
    """`reachable`, by limits of classes and needs, largest first."""
    largest: dict[int, Layout] = {}
    for count in range(1, MAX_GROUPS + 1):
        for chosen in combinations(limits, count):
            for layout in _filled(chosen, needs, merges=count == MAX_GROUPS):
                slots = slots_of(layout)
                largest[slots] = max(largest.get(slots, ()), layout, key=positions_of)
    return tuple(largest.values())


def _filled(limits: Sequence[int], needs: Sequence[int], *, merges: bool) -> Iterator[Layout]:
    """Layouts of groups of these classes, for every number of slots that the rows can fill.

    Args:
        limits: of the groups, largest first.
        needs: likewise.
        merges: whether the smallest group also takes rows of lower classes.
    """
    limit, *smaller = limits
    able = sum(_limit_for(need) >= limit for need in needs)
    if not able:
        return
    capacity = capacity_for(min(needs[0], limit))
    if not smaller:
        rows = len(needs) if merges else able
        yield (Group(power_of_two(rows), capacity, limit),)
        return
    slots = 1
    while (rows := slots // 2 + 1) <= able:
        # Every row that reaches this class also fills the capacity of a smaller one.
        for rest in _filled(smaller, needs[rows:], merges=merges):
            yield (*rest, Group(slots, capacity, limit))
        slots *= 2


def _excess(group: Group, needs: Sequence[int]) -> int:
    if not needs:
        return group.slots
    slots = group.slots // len(needs)
    return max(slots, group.capacity // capacity_for(max(needs))) - 1


def _limit_for(positions: int) -> int:
    limit = FIRST_LIMIT
    while limit < positions:
        limit *= 4
    return limit


def _kept(layout: Layout, rows: Seated) -> list[int] | None:
    """The slots that rows have, and free ones for joining rows; None if they do not fit."""
    taken = {slot for slot, _ in rows}
    free = [slot for slot in range(slots_of(layout)) if slot not in taken]
    slots: list[int] = []
    for slot, need in rows:
        if slot is None:
            group = _group_for(layout, need)
            slot = next((s for s in free if _group_at(layout, s) == group), None)
            if slot is None:
                return None
            free.remove(slot)
        elif need > layout[_group_at(layout, slot)].limit:
            return None
        slots.append(slot)
    return slots


def _grown(layout: Layout, slots: Sequence[int], rows: Seated) -> Layout:
    capacities = [group.capacity for group in layout]
    for slot, (_, need) in zip(slots, rows, strict=True):
        group = _group_at(layout, slot)
        capacities[group] = max(capacities[group], capacity_for(need))
    return tuple(
        replace(group, capacity=capacity)
        for group, capacity in zip(layout, capacities, strict=True)
    )


def _group_for(layout: Layout, need: int) -> int | None:
    """The group for a row; None if its class has no group yet and may get one."""
    for index, group in enumerate(layout):
        if need <= group.limit:
            return index if _limit_for(need) == group.limit or len(layout) == MAX_GROUPS else None
    return None


def _group_at(layout: Layout, slot: int) -> int:
    index = 0
    while slot >= layout[index].slots:
        slot -= layout[index].slots
        index += 1
    return index
