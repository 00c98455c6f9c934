"""The scheduler: who waits for whom, for any order of arrivals, ends and cancellations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.decode.actions import (
    Action,
    Decode,
    Evict,
    Idle,
    Join,
    Pause,
    Prefill,
    Resume,
)
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.row import BULK, DEFAULT, HIGH, DecodeRow, Stage
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.row import Known, Row, Sampling


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rows:
    """A scheduler of rows that take a byte each, in the batch as well as paused."""

    def __init__(
        self,
        max_rows: int = 4,
        chunk: int = 8,
        memory: int = 100,
        patience: float = 30.0,
        *,
        shares: bool = False,
        pads: bool = True,
    ) -> None:
        self.clock = Clock()
        budget = MemoryBudget(memory, 0, len)
        self.chunks = ChunkSize(chunk)
        self.scheduler = Scheduler(
            max_rows,
            self.chunks,
            budget,
            shares=shares,
            pads=pads,
            patience=patience,
            clock=self.clock,
        )
        self.rows: dict[str, DecodeRow] = {}
        self.held: dict[str, int] = {}

    @classmethod
    def filled(cls, *levels: int, patience: float = 30.0) -> Rows:
        """A full batch of decoding rows, ``row-0`` and so on, of these levels."""
        rows = cls(len(levels), patience=patience)
        for place, level in enumerate(levels):
            rows.add(f"row-{place}", 1, level)
        while len(rows.scheduler.decoding) < len(levels):
            rows.drive()
        rows.drive()
        return rows

    def add(
        self, name: str, prompt: int | list[int], level: int = DEFAULT, *, cache: bool = True
    ) -> None:
        """Add a row with this prompt, or with a prompt of this length that no other row shares."""
        if isinstance(prompt, int):
            prompt = [1000 + len(self.rows)] * prompt
        row = DecodeRow(Row(name, prompt, 100, Sampling(), cache=cache), level)
        self.rows[name] = row
        self.scheduler.add(row)

    def remove(self, name: str) -> None:
        self.scheduler.remove(self.rows[name])

    def drive(self, *, keeps: bool = True) -> Action:
        action = self.scheduler.next()
        if isinstance(action, Join):
            self.scheduler.took(action.row, Known(self.held.get(action.row.row_id, 0)))
        elif isinstance(action, Prefill):
            left = {row.row_id: row.left - count for row, count in action.tokens.items()}
            self.scheduler.read(action, left)
        elif isinstance(action, Pause):
            self.scheduler.paused(action.row, 1 if keeps else None)
        return action

    def told(self, steps: int = 1, *, keeps: bool = True) -> list[str]:
        """The next actions in words."""
        return [words(self.drive(keeps=keeps)) for _ in range(steps)]


def words(action: Action) -> str:
    match action:
        case Prefill(tokens):
            return "read " + ", ".join(f"{n} of {row.row_id}" for row, n in tokens.items())
        case Join(row) | Pause(row) | Resume(row) | Evict(row):
            return f"{type(action).__name__.lower()} {row.row_id}"
    return type(action).__name__.lower()


def test_without_rows_there_is_nothing_to_do() -> None:
    assert Rows().told() == ["idle"]


def test_a_prompt_is_read_in_chunks_and_then_decodes() -> None:
    rows = Rows()
    rows.add("a", 20)
    assert rows.told(5) == ["join a", "read 8 of a", "read 8 of a", "read 4 of a", "decode"]


def test_rows_are_coming_whose_prompts_take_one_more_chunk_at_most() -> None:
    rows = Rows()
    for name, tokens in {"a": 4, "b": 4, "long": 20, "d": 4, "e": 4}.items():
        rows.add(name, tokens)
    coming = [rows.scheduler.coming for _ in range(14) if rows.told() == ["decode"]]
    assert coming == [0, 0, 2, 1, 0], "none while two pieces of a prompt are left, or no place"


def test_rows_of_one_level_with_prompts_of_like_length_are_read_together() -> None:
    rows = Rows(8, chunk=16)
    for name, tokens in {"a": 4, "long": 9, "b": 3, "c": 4, "d": 4, "e": 4}.items():
        rows.add(name, tokens)
    assert rows.told(6) == ["join a", "join long", "join b", "join c", "join d", "join e"]
    assert rows.told(3) == ["read 4 of a, 4 of c, 4 of d, 4 of e", "decode", "read 9 of long"]


def test_an_engine_that_does_not_pad_reads_only_prompts_of_one_length_together() -> None:
    rows = Rows(8, chunk=16, pads=False)
    for name, tokens in {"a": 4, "b": 3, "c": 4}.items():
        rows.add(name, tokens)
    assert rows.told(3) == ["join a", "join b", "join c"]
    assert rows.told(3) == ["read 4 of a, 4 of c", "decode", "read 3 of b"]


class Gathering(Rows):
    """Bulk rows on a device where a chunk takes half a second, however few its tokens are."""

    def __init__(self, decoding: int, level: int = BULK) -> None:
        super().__init__(decoding + 4, chunk=64, shares=True)
        for tokens in (8, 16, 24, 32) * 2:
            self.chunks.read(0, False, tokens, 0.5 + tokens / 1000)
        for place in range(decoding):
            self.add(f"row-{place}", 4, level)
        while len(self.scheduler.decoding) < decoding:
            self.drive()

    def decodes(self, seconds: float) -> None:
        """The next action is a step, and it takes this long."""
        assert self.told() == ["decode"]
        self.clock.now += seconds


def test_bulk_rows_gather_until_idle_places_have_cost_as_much_as_a_chunk_will() -> None:
    rows = Gathering(decoding=8)
    rows.add("a", 4, BULK)
    assert rows.told() == ["decode"], "after a chunk"
    rows.decodes(1)
    rows.decodes(0.6)  # one place is idle
    rows.add("b", 4, BULK)
    rows.decodes(0.5)
    rows.decodes(0.4)  # two are
    assert rows.told(3) == ["join a", "join b", "read 4 of a, 4 of b"], "8 rows for half a second"


def test_rows_that_have_gathered_all_join_without_another_wait() -> None:
    rows = Gathering(decoding=4)
    rows.told()
    for name, tokens in {"a": 40, "b": 60, "c": 40}.items():
        rows.add(name, tokens, BULK)
    rows.decodes(1)
    rows.clock.now += 1
    assert rows.told(4) == ["join a", "join b", "join c", "read 40 of a"]
    assert rows.told(4) == ["decode", "read 60 of b", "decode", "read 40 of c"]
    rows.told()
    rows.add("d", 40, BULK)
    assert rows.told() == ["decode"], "it gathers anew"


def test_rows_that_share_a_beginning_gather_once() -> None:
    rows = Gathering(decoding=4)
    rows.told()
    beginning = list(range(70))
    for name in "abc":
        rows.add(name, [*beginning, ord(name)], BULK)
        rows.held[name] = 70 if name > "a" else 0
    rows.clock.now += 1
    assert rows.told(3) == ["join a", "read 64 of a", "decode"]
    assert rows.told(3) == ["join b", "join c", "read 6 of a"]


def test_rows_whose_tokens_are_awaited_gather_for_nobody() -> None:
    for level, reader in ((BULK, DEFAULT), (DEFAULT, BULK)):
        rows = Gathering(decoding=8, level=level)
        rows.told()
        rows.add("a", 4, reader)
        assert rows.told(2) == ["join a", "read 4 of a"]


def test_a_row_beside_no_other_gathers_for_nobody() -> None:
    rows = Gathering(decoding=0)
    rows.add("a", 4, BULK)
    assert rows.told(2) == ["join a", "read 4 of a"]


def test_rows_join_only_until_they_fill_some_chunks_and_never_beside_more_urgent_ones() -> None:
    rows = Rows(8, chunk=2)
    for name in "abcd":
        rows.add(name, 4)
    assert rows.told(4) == ["join a", "join b", "read 2 of a", "join c"]
    rows.told(2)
    rows.add("high", 3, HIGH)
    assert rows.told(5) == ["join high", "read 2 of high", "decode", "read 1 of high", "decode"]


def test_a_row_that_begins_as_another_waits_until_that_beginning_is_kept() -> None:
    rows = Rows(8, chunk=100, shares=True)
    beginning = list(range(70))
    rows.add("first", [*beginning, *[1] * 30])
    rows.add("second", [*beginning, *[2] * 20])
    rows.held["second"] = 70
    rows.add("other", 5)
    assert rows.told(5) == [
        "join first",
        "join other",
        "read 70 of first",
        "join second",
        "read 29 of first, 19 of second",
    ]
    assert rows.rows["second"].cached == 70


def test_no_row_waits_for_a_beginning_that_a_less_urgent_row_is_kept_from_reading() -> None:
    rows = Rows(8, shares=True)
    beginning = list(range(200))
    rows.add("bulk", [*beginning, 1], BULK)
    assert rows.told(2) == ["join bulk", "read 8 of bulk"]
    rows.add("high", [*beginning, 2], HIGH)
    assert rows.told(2) == ["read 8 of bulk", "read 8 of bulk"]
    rows.add("other", 100, HIGH)
    assert rows.told(3) == ["join other", "join high", "read 8 of high"]


def test_a_row_that_does_not_want_the_cache_waits_for_nobody() -> None:
    rows = Rows(8, chunk=100, shares=True)
    rows.add("first", list(range(90)))
    rows.add("second", list(range(90)), cache=False)
    assert rows.told(2) == ["join first", "join second"]


def test_a_running_row_waits_for_one_chunk_at_most() -> None:
    rows = Rows()
    rows.add("a", 1)
    rows.told(3)
    rows.add("b", 24)
    kinds = [type(rows.drive()) for _ in range(7)]
    assert kinds == [Join, Prefill, Decode, Prefill, Decode, Prefill, Decode]


def test_the_best_priority_goes_first_and_the_oldest_among_equals() -> None:
    rows = Rows(1, chunk=100)
    for name, level in (("bulk", BULK), ("first", DEFAULT), ("second", DEFAULT), ("high", HIGH)):
        rows.add(name, 1, level)
    order = []
    while isinstance(action := rows.drive(), Join):
        order.append(action.row.row_id)
        rows.scheduler.remove(action.row)
    assert order == ["high", "first", "second", "bulk"]


def test_a_half_read_prompt_keeps_its_place_when_a_better_one_arrives() -> None:
    rows = Rows(1)
    rows.add("slow", 16, DEFAULT)
    rows.told(2)
    rows.add("high", 8, HIGH)
    assert rows.told(2) == ["read 8 of slow", "decode"]


def test_a_row_that_is_not_in_the_batch_can_be_removed() -> None:
    rows = Rows(1)
    rows.scheduler.remove(DecodeRow(Row("nobody", [0], 1, Sampling())))
    rows.add("waiting", 3)
    rows.remove("waiting")
    assert rows.told() == ["idle"]


def test_a_row_of_the_best_level_takes_the_place_of_the_youngest_bulk_row() -> None:
    rows = Rows.filled(BULK, BULK, DEFAULT)
    rows.add("high", 4, HIGH)
    assert rows.told(4) == ["pause row-1", "join high", "read 4 of high", "decode"]
    assert {row.row_id for row in rows.scheduler.decoding} == {"row-0", "row-2", "high"}
    rows.remove("high")
    assert rows.told(2) == ["resume row-1", "decode"]


def test_a_row_that_has_decoded_for_long_makes_place_as_one_that_has_not() -> None:
    rows = Rows.filled(BULK, BULK, patience=30)
    rows.clock.now = 31
    rows.add("high", 1, HIGH)
    assert rows.told(3) == ["pause row-1", "join high", "read 1 of high"]
    rows.clock.now = 31 + 30
    rows.remove("high")
    assert rows.told(2) == ["decode", "resume row-1"]


def test_a_paused_row_whose_cache_is_lost_reads_its_tokens_again() -> None:
    rows = Rows.filled(BULK)
    rows.add("high", 1, HIGH)
    rows.rows["row-0"].tokens += [7] * 10
    assert rows.told(keeps=False) == ["pause row-0"]
    rows.drive()
    rows.remove("high")
    assert rows.told(3) == ["join row-0", "read 8 of row-0", "read 3 of row-0"]


def test_only_bulk_rows_make_place_and_only_for_the_best_level() -> None:
    rows = Rows.filled(DEFAULT, HIGH)
    rows.add("high", 1, HIGH)
    assert rows.told() == ["decode"]
    rows = Rows.filled(BULK)
    rows.add("default", 1, DEFAULT)
    assert rows.told() == ["decode"]


def test_a_row_that_has_waited_long_goes_first_and_is_not_paused_any_more() -> None:
    rows = Rows.filled(DEFAULT, patience=30)
    rows.add("bulk", 1, BULK)
    rows.clock.now = 30
    rows.add("high", 1, HIGH)
    rows.drive()
    rows.remove("row-0")
    assert rows.told(5) == ["join bulk", "read 1 of bulk", "decode", "decode", "decode"]


def test_a_steady_stream_of_better_rows_holds_a_bulk_row_up_no_longer_than_its_patience() -> None:
    rows = Rows.filled(HIGH, patience=30)
    rows.add("bulk", 1, BULK)
    running = "row-0"
    for arrival in range(100):
        rows.clock.now += 1
        rows.add(f"high-{arrival}", 1, HIGH)
        rows.remove(running)
        action = rows.drive()
        rows.told(2)
        assert isinstance(action, Join)
        running = action.row.row_id
        if running == "bulk":
            break
    assert rows.clock.now == 30


def test_rows_that_do_not_fit_together_wait_however_many_places_are_free() -> None:
    rows = Rows(8, memory=2)
    for name in "abc":
        rows.add(name, 1)
    assert rows.told(4) == ["join a", "join b", "read 1 of a, 1 of b", "decode"]
    rows.remove("a")
    assert rows.told(2) == ["join c", "read 1 of c"]


def test_a_paused_rows_cache_goes_only_where_it_is_in_the_way() -> None:
    rows = Rows(2, memory=3)
    for name in ("a", "b"):
        rows.add(name, 1, BULK)
    rows.told(4)
    rows.add("first", 1, HIGH)
    assert rows.told(3) == ["pause b", "join first", "read 1 of first"]
    rows.add("second", 1, HIGH)
    assert rows.told(5) == ["decode", "pause a", "evict b", "join second", "read 1 of second"]
    rows.remove("first")
    rows.remove("second")
    assert rows.told(4) == ["resume a", "join b", "read 1 of b", "decode"]


class _Model:
    """What must hold of a scheduler, whatever happens to its rows.

    A row in the batch takes a byte, and so does the cache of a paused one.
    """

    def __init__(self, max_rows: int, chunk: int, memory: int) -> None:
        self.clock = Clock()
        self.max_rows, self.memory, self.chunk = max_rows, memory, chunk
        budget = MemoryBudget(memory, 0, len)
        chunks = ChunkSize(chunk)
        self.scheduler = Scheduler(max_rows, chunks, budget, patience=50, clock=self.clock)
        self.rows: dict[str, DecodeRow] = {}
        self.batch: set[DecodeRow] = set()
        self.paused: set[DecodeRow] = set()
        self.added = 0
        self.chunks_since_decode = 0

    def add(self, tokens: int, level: int) -> None:
        name = f"row-{self.added}"
        self.added += 1
        self.rows[name] = DecodeRow(Row(name, [0] * tokens, 100, Sampling()), level)
        self.scheduler.add(self.rows[name])

    def remove(self, name: str) -> None:
        if row := self.rows.pop(name, None):
            self.scheduler.remove(row)
            self.batch.discard(row)
            self.paused.discard(row)

    @property
    def decoding(self) -> set[DecodeRow]:
        return {row for row in self.batch if not row.left}

    def act(self, keeps: bool) -> bool:
        self.clock.now += 1
        decoding = self.decoding
        action = self.scheduler.next()
        match action:
            case Join(row):
                assert row not in self.batch
                self.batch.add(row)
                self.scheduler.took(row, Known())
            case Prefill(tokens):
                assert self.batch >= set(tokens)
                assert len({(row.context, row.rank[0]) for row in tokens}) == 1
                assert all(0 < count <= row.left for row, count in tokens.items())
                assert len(tokens) * max(tokens.values()) <= self.chunk
                left = {row.row_id: row.left - count for row, count in tokens.items()}
                self.scheduler.read(action, left)
                self.chunks_since_decode += bool(decoding)
                assert self.chunks_since_decode <= 1, "a running row waits for one chunk at most"
            case Pause(row):
                assert row in decoding
                assert row.level == BULK
                assert any(r.level == HIGH for r in set(self.rows.values()) - self.batch)
                self.batch.remove(row)
                if keeps:
                    self.paused.add(row)
                self.scheduler.paused(row, 1 if keeps else None)
            case Resume(row):
                assert row in self.paused
                self.paused.remove(row)
                self.batch.add(row)
            case Evict(row):
                assert row in self.paused
                assert len(self.batch) + 1 + len(self.paused) > self.memory, "it is in the way"
                assert row.left == row.length
                self.paused.remove(row)
            case Decode():
                assert decoding
                self.chunks_since_decode = 0
            case Idle():
                assert not self.rows
        if isinstance(action, Join | Resume):
            assert action.room == self.memory - len(self.batch) - len(self.paused)
            assert len(self.batch) == 1 or len(self.batch) + len(self.paused) <= self.memory
        assert self.scheduler.joined == len(self.batch) <= self.max_rows
        assert set(self.scheduler.decoding) == self.decoding
        assert {row for row in self.scheduler.rows if row.stage is Stage.PAUSED} == self.paused
        assert self.scheduler.waiting == len(self.rows) - len(self.batch)
        if not self.decoding:
            self.chunks_since_decode = 0
        return not isinstance(action, Idle)


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.sampled_from((BULK, BULK, HIGH, DEFAULT))),
        st.tuples(st.just("act"), st.integers(0, 1), st.integers(1, 20)),
        st.tuples(st.just("remove"), st.integers(0, 30), st.just(0)),
    ),
    max_size=150,
)


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
                for _ in range(level):
                    model.act(keeps=bool(number))
            case _:
                model.remove(f"row-{number}")
    # Whatever happened, all rows get their turn once those before them have left.
    for _ in range(5000):
        if not model.act(keeps=True):
            break
        for row in list(model.decoding):
            model.remove(row.row_id)
    assert not model.rows
