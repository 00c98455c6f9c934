"""The scheduler: who waits for whom, for any order of arrivals, ends and cancellations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.scheduler import Decode, Idle, Prefill, Scheduler


def drive(scheduler: Scheduler, lengths: dict[str, int]) -> Prefill | Decode | Idle:
    """One action, obeyed as an engine would."""
    action = scheduler.next()
    if isinstance(action, Prefill):
        lengths[action.row_id] -= action.tokens
        scheduler.read(action.row_id, lengths[action.row_id])
    return action


def test_without_rows_there_is_nothing_to_do() -> None:
    assert Scheduler(4, 8).next() == Idle()


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    scheduler = Scheduler(4, 8)
    scheduler.add("a", 20)
    lengths = {"a": 20}
    actions = [drive(scheduler, lengths) for _ in range(4)]
    assert actions == [
        Prefill("a", 8, True),
        Prefill("a", 8, False),
        Prefill("a", 4, False),
        Decode(),
    ]


def test_a_running_row_waits_for_one_chunk_at_most() -> None:
    scheduler = Scheduler(4, 8)
    lengths = {"a": 1, "b": 24}
    scheduler.add("a", 1)
    drive(scheduler, lengths)
    scheduler.add("b", 24)
    kinds = [type(drive(scheduler, lengths)) for _ in range(6)]
    assert kinds == [Decode, Prefill, Decode, Prefill, Decode, Prefill]


def test_the_best_priority_goes_first_and_the_oldest_among_equals() -> None:
    scheduler = Scheduler(1, 100)
    lengths = {"bulk": 1, "first": 1, "second": 1, "high": 1}
    for row_id, priority in (("bulk", 2), ("first", 1), ("second", 1), ("high", 0)):
        scheduler.add(row_id, 1, priority)
    order = []
    while isinstance(action := drive(scheduler, lengths), Prefill):
        order.append(action.row_id)
        scheduler.remove(action.row_id)
    assert order == ["high", "first", "second", "bulk"]


def test_a_half_read_prompt_keeps_its_place_when_a_better_one_arrives() -> None:
    scheduler = Scheduler(1, 8)
    lengths = {"slow": 16, "high": 8}
    scheduler.add("slow", 16, 1)
    drive(scheduler, lengths)
    scheduler.add("high", 8, 0)
    assert drive(scheduler, lengths) == Prefill("slow", 8, False)
    assert drive(scheduler, lengths) == Decode()


def test_unknown_rows_can_be_removed() -> None:
    Scheduler(1, 8).remove("nobody")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 50), st.integers(0, 2)),
        st.tuples(st.just("act"), st.just(0), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=200)
@given(max_rows=st.integers(1, 5), chunk=st.integers(1, 16), script=steps)
def test_no_order_of_events_overfills_the_batch_stalls_rows_or_forgets_one(
    max_rows: int, chunk: int, script: list[tuple[str, int, int]]
) -> None:
    scheduler = Scheduler(max_rows, chunk)
    unread: dict[str, int] = {}
    ranks: dict[str, tuple[int, int]] = {}
    joined: set[str] = set()
    decoding: set[str] = set()
    prefills_since_decode = 0

    def act() -> bool:
        nonlocal prefills_since_decode
        action = scheduler.next()
        if isinstance(action, Prefill):
            row = action.row_id
            assert 0 < action.tokens <= chunk
            assert action.joins == (row not in joined)
            room = len(joined) < max_rows
            assert action.joins <= room
            eligible = [r for r in unread if r not in decoding and (room or r in joined)]
            assert ranks[row] == min(ranks[r] for r in eligible)
            joined.add(row)
            unread[row] -= action.tokens
            scheduler.read(row, unread[row])
            if decoding:
                prefills_since_decode += 1
                assert prefills_since_decode <= 1
            if not unread[row]:
                decoding.add(row)
        elif isinstance(action, Decode):
            assert decoding
            prefills_since_decode = 0
        else:
            assert not unread
        assert scheduler.joined == len(joined) <= max_rows
        assert scheduler.decoding == len(decoding)
        return not isinstance(action, Idle)

    def remove(row: str) -> None:
        nonlocal prefills_since_decode
        scheduler.remove(row)
        unread.pop(row, None)
        joined.discard(row)
        decoding.discard(row)
        if not decoding:
            prefills_since_decode = 0

    for kind, number, priority in script:
        if kind == "add":
            row = f"row-{len(ranks)}"
            ranks[row] = (priority, len(ranks))
            unread[row] = number
            scheduler.add(row, number, priority)
        elif kind == "act":
            act()
        else:
            remove(f"row-{number}")
    # Whatever happened, all rows get their turn once those before them have left.
    for _ in range(5000):
        if not act():
            break
        for row in list(decoding):
            remove(row)
    assert not unread
