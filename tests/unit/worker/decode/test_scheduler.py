"""The scheduler: who waits for whom, for any order of arrivals, ends and cancellations."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from omlx_worker.decode.chunk_size import PrefillPace
from omlx_worker.decode.scheduler import (
    BULK,
    DEFAULT,
    HIGH,
    Action,
    Decode,
    Idle,
    Pause,
    Prefill,
    Resume,
    Scheduler,
)


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def drive(scheduler: Scheduler, lengths: dict[str, int], *, keeps: bool = True) -> Action:
    """One action, obeyed as an engine would that keeps the caches of paused rows, or not."""
    action = scheduler.next()
    if isinstance(action, Prefill):
        lengths[action.row_id] -= action.tokens
        scheduler.read(action.row_id, lengths[action.row_id])
    elif isinstance(action, Pause):
        lengths[action.row_id] = 0 if keeps else 8
        scheduler.paused(action.row_id, keeps, 8)
    return action


def filled(*levels: int, patience: float = 30.0) -> tuple[Scheduler, dict[str, int], Clock]:
    """A full batch of decoding rows, ``row-0`` and so on, of these levels."""
    clock = Clock()
    scheduler = Scheduler(len(levels), PrefillPace(8), patience=patience, clock=clock)
    lengths = {f"row-{place}": 1 for place in range(len(levels))}
    for row_id, level in zip(lengths, levels, strict=True):
        scheduler.add(row_id, 1, level)
    while scheduler.decoding < len(levels):
        drive(scheduler, lengths)
    drive(scheduler, lengths)
    return scheduler, lengths, clock


def test_without_rows_there_is_nothing_to_do() -> None:
    assert Scheduler(4, PrefillPace(8)).next() == Idle()


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    scheduler = Scheduler(4, PrefillPace(8))
    scheduler.add("a", 20)
    lengths = {"a": 20}
    actions = [drive(scheduler, lengths) for _ in range(4)]
    assert actions == [
        Prefill("a", 8, True),
        Prefill("a", 8, False),
        Prefill("a", 4, False),
        Decode(),
    ]


def test_rows_are_coming_that_join_with_a_chunk_each_after_a_step_each() -> None:
    scheduler, lengths = Scheduler(4, PrefillPace(8)), {"a": 4, "b": 4, "long": 20, "d": 4, "e": 4}
    for row_id, tokens in lengths.items():
        scheduler.add(row_id, tokens)
    coming = [scheduler.coming for _ in range(12) if drive(scheduler, lengths) == Decode()]
    assert coming == [3, 2, 0, 2, 1, 0], "nobody while two pieces of a prompt are left, or no place"


def test_a_prompt_is_being_read_from_its_first_piece_to_its_last() -> None:
    scheduler, lengths = Scheduler(2, PrefillPace(8)), {"short": 1, "long": 20}
    for row_id, length in lengths.items():
        scheduler.add(row_id, length)
    assert not scheduler.reading
    seen = [scheduler.reading for _ in range(9) if drive(scheduler, lengths) == Decode()]
    assert seen[0] is False
    assert seen.count(True) == 2
    assert seen[-1] is False


def test_a_running_row_waits_for_one_chunk_at_most() -> None:
    scheduler = Scheduler(4, PrefillPace(8))
    lengths = {"a": 1, "b": 24}
    scheduler.add("a", 1)
    drive(scheduler, lengths)
    scheduler.add("b", 24)
    kinds = [type(drive(scheduler, lengths)) for _ in range(6)]
    assert kinds == [Decode, Prefill, Decode, Prefill, Decode, Prefill]


def test_the_best_priority_goes_first_and_the_oldest_among_equals() -> None:
    scheduler = Scheduler(1, PrefillPace(100))
    lengths = {"bulk": 1, "first": 1, "second": 1, "high": 1}
    for row_id, priority in (("bulk", 2), ("first", 1), ("second", 1), ("high", 0)):
        scheduler.add(row_id, 1, priority)
    order = []
    while isinstance(action := drive(scheduler, lengths), Prefill):
        order.append(action.row_id)
        scheduler.remove(action.row_id)
    assert order == ["high", "first", "second", "bulk"]


def test_a_half_read_prompt_keeps_its_place_when_a_better_one_arrives() -> None:
    scheduler = Scheduler(1, PrefillPace(8))
    lengths = {"slow": 16, "high": 8}
    scheduler.add("slow", 16, 1)
    drive(scheduler, lengths)
    scheduler.add("high", 8, 0)
    assert drive(scheduler, lengths) == Prefill("slow", 8, False)
    assert drive(scheduler, lengths) == Decode()


def test_unknown_rows_can_be_removed() -> None:
    Scheduler(1, PrefillPace(8)).remove("nobody")


def test_a_row_of_the_best_level_takes_the_place_of_the_youngest_bulk_row() -> None:
    scheduler, lengths, _ = filled(BULK, BULK, DEFAULT)
    scheduler.add("high", 4, HIGH)
    lengths["high"] = 4
    actions = [drive(scheduler, lengths) for _ in range(3)]
    assert actions == [Pause("row-1"), Prefill("high", 4, True), Decode()]
    assert set(scheduler.decoding_rows) == {"row-0", "row-2", "high"}
    scheduler.remove("high")
    assert [drive(scheduler, lengths) for _ in range(2)] == [Resume("row-1"), Decode()]


def test_a_row_that_has_decoded_for_long_makes_place_as_one_that_has_not() -> None:
    scheduler, lengths, clock = filled(BULK, BULK, patience=30)
    clock.now = 31
    scheduler.add("high", 1, HIGH)
    lengths["high"] = 1
    assert drive(scheduler, lengths) == Pause("row-1")
    assert drive(scheduler, lengths) == Prefill("high", 1, True)
    clock.now = 31 + 30
    scheduler.remove("high")
    assert drive(scheduler, lengths) == Decode()
    assert drive(scheduler, lengths) == Resume("row-1")


def test_a_paused_row_whose_cache_was_let_go_reads_its_tokens_again() -> None:
    scheduler, lengths, _ = filled(BULK)
    scheduler.add("high", 1, HIGH)
    lengths["high"] = 1
    assert drive(scheduler, lengths) == Pause("row-0")
    scheduler.paused("row-0", kept=False, tokens=11)
    lengths["row-0"] = 11
    drive(scheduler, lengths)
    scheduler.remove("high")
    assert drive(scheduler, lengths) == Prefill("row-0", 8, True)
    assert drive(scheduler, lengths) == Prefill("row-0", 3, False)


def test_only_bulk_rows_make_place_and_only_for_the_best_level() -> None:
    scheduler, lengths, _ = filled(DEFAULT, HIGH)
    scheduler.add("high", 1, HIGH)
    assert drive(scheduler, lengths) == Decode()
    scheduler, lengths, _ = filled(BULK)
    scheduler.add("default", 1, DEFAULT)
    assert drive(scheduler, lengths) == Decode()


def test_a_row_that_has_waited_long_goes_first_and_is_not_paused_any_more() -> None:
    scheduler, lengths, clock = filled(DEFAULT, patience=30)
    scheduler.add("bulk", 1, BULK)
    lengths["bulk"] = 1
    clock.now = 30
    scheduler.add("high", 1, HIGH)
    lengths["high"] = 1
    drive(scheduler, lengths)
    scheduler.remove("row-0")
    assert drive(scheduler, lengths) == Prefill("bulk", 1, True)
    assert [type(drive(scheduler, lengths)) for _ in range(3)] == [Decode] * 3


def test_a_steady_stream_of_better_rows_holds_a_bulk_row_up_no_longer_than_its_patience() -> None:
    scheduler, lengths, clock = filled(HIGH, patience=30)
    scheduler.add("bulk", 1, BULK)
    lengths["bulk"] = 1
    running = "row-0"
    for arrival in range(100):
        clock.now += 1
        scheduler.add(f"high-{arrival}", 1, HIGH)
        lengths[f"high-{arrival}"] = 1
        scheduler.remove(running)
        action = drive(scheduler, lengths)
        drive(scheduler, lengths)
        assert isinstance(action, Prefill)
        running = action.row_id
        if running == "bulk":
            break
    assert clock.now == 30


def test_rows_that_do_not_fit_together_wait_however_many_places_are_free() -> None:
    batch: set[str] = set()
    scheduler = Scheduler(8, PrefillPace(8), fits=lambda rows: len(rows) <= 2)
    lengths = dict.fromkeys("abc", 1)
    for row_id in lengths:
        scheduler.add(row_id, 1)
    while not isinstance(action := drive(scheduler, lengths), Decode):
        assert isinstance(action, Prefill)
        batch.add(action.row_id)
        drive(scheduler, lengths)
    assert batch == {"a", "b"}
    scheduler.remove("a")
    assert drive(scheduler, lengths) == Prefill("c", 1, True)


class _Model:
    """What must hold of a scheduler, whatever happens to its rows."""

    def __init__(self, max_rows: int, chunk: int, memory: int) -> None:
        self.clock = Clock()
        self.max_rows, self.memory, self.chunk = max_rows, memory, chunk
        self.scheduler = Scheduler(
            max_rows, PrefillPace(chunk), patience=50, fits=self.fits, clock=self.clock
        )
        self.unread: dict[str, int] = {}
        self.levels: dict[str, int] = {}
        self.batch: set[str] = set()
        self.paused: set[str] = set()
        self.added = 0
        self.chunks_since_decode = 0

    def fits(self, rows: Sequence[str]) -> bool:
        return len(rows) == 1 or len(rows) <= self.memory

    def add(self, tokens: int, level: int) -> None:
        row = f"row-{self.added}"
        self.added += 1
        self.unread[row], self.levels[row] = tokens, level
        self.scheduler.add(row, tokens, level)

    def remove(self, row: str) -> None:
        self.scheduler.remove(row)
        self.unread.pop(row, None)
        self.batch.discard(row)
        self.paused.discard(row)

    @property
    def decoding(self) -> set[str]:
        return {row for row in self.batch if not self.unread[row]}

    def act(self, keeps: bool) -> bool:
        self.clock.now += 1
        decoding = self.decoding
        action = self.scheduler.next()
        match action:
            case Prefill(row, tokens, joins):
                assert 0 < tokens <= min(self.chunk, self.unread[row])
                assert joins == (row not in self.batch)
                self.batch.add(row)
                self.unread[row] -= tokens
                self.scheduler.read(row, self.unread[row])
                self.chunks_since_decode += bool(decoding)
                assert self.chunks_since_decode <= 1, "a running row waits for one chunk at most"
            case Pause(row):
                assert row in decoding
                assert self.levels[row] == BULK
                assert any(self.levels[r] == HIGH for r in set(self.unread) - self.batch)
                self.batch.remove(row)
                self.unread[row] = 0 if keeps else 5
                if keeps:
                    self.paused.add(row)
                self.scheduler.paused(row, keeps, 5)
            case Resume(row):
                assert row in self.paused
                self.paused.remove(row)
                self.batch.add(row)
            case Decode():
                assert decoding
                self.chunks_since_decode = 0
            case Idle():
                assert not self.unread
        assert self.fits(list(self.batch)) or not self.batch
        assert self.scheduler.joined == len(self.batch) <= self.max_rows
        assert set(self.scheduler.decoding_rows) == self.decoding
        assert set(self.scheduler.paused_rows) == self.paused
        assert self.scheduler.waiting == len(self.unread) - len(self.batch)
        if not self.decoding:
            self.chunks_since_decode = 0
        return not isinstance(action, Idle)


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 50), st.integers(0, 2)),
        st.tuples(st.just("act"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    ),
    max_size=150,
)


@settings(deadline=None, max_examples=300)
@given(
    max_rows=st.integers(1, 5), chunk=st.integers(1, 16), memory=st.integers(1, 5), script=events
)
def test_no_order_of_events_overfills_the_batch_stalls_rows_or_forgets_one(
    max_rows: int, chunk: int, memory: int, script: list[tuple[str, int, int]]
) -> None:
    model = _Model(max_rows, chunk, memory)
    for kind, number, level in script:
        match kind:
            case "add":
                model.add(number, level)
            case "act":
                model.act(keeps=bool(number))
            case _:
                model.remove(f"row-{number}")
    # Whatever happened, all rows get their turn once those before them have left.
    for _ in range(5000):
        if not model.act(keeps=True):
            break
        for row in list(model.decoding):
            model.remove(row)
    assert not model.unread
