"""What holds of the scheduler for any order of arrivals, ends and cancellations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.scheduler import Scheduler
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import BULK, DEFAULT, HIGH, Row, Stage
from tests.helpers.clock import Clock
from tests.helpers.scheduling import follow


class _Model:
    """What must hold of a scheduler, whatever happens to its rows.

    A row in the batch takes a byte, and so do the pages of a suspended one.
    """

    def __init__(self, max_rows: int, chunk: int, memory: int) -> None:
        self.clock = Clock()
        self.max_rows, self.memory, self.chunk = max_rows, memory, chunk
        budget = MemoryBudget(memory, 0, len)
        chunks = ChunkSize(chunk)
        self.scheduler = Scheduler(max_rows, chunks, budget, clock=self.clock)
        self.rows: dict[str, Row] = {}
        self.batch: set[Row] = set()
        self.suspended: set[Row] = set()
        self.added = 0
        self.chunks_since_decode = 0

    def add(self, tokens: int, level: int) -> None:
        name = f"row-{self.added}"
        self.added += 1
        self.rows[name] = Row(RowRequest(name, [0] * tokens, 100, Sampling()), level)
        self.scheduler.add(self.rows[name])

    def remove(self, name: str) -> None:
        if row := self.rows.pop(name, None):
            self.scheduler.remove(row)
            self.batch.discard(row)
            self.suspended.discard(row)

    @property
    def decoding(self) -> set[Row]:
        return {row for row in self.batch if row.stage is Stage.DECODING}

    def act(self) -> bool:
        self.clock.now += 1
        decoding = self.decoding
        act = self.scheduler.next()
        if act.row:
            self._check_move(act.row, decoding)
        elif act.chunk:
            tokens = act.chunk.tokens
            assert self.batch >= set(tokens)
            assert len({row.rank[0] for row in tokens}) == 1
            assert all(min(1, row.left) <= count <= row.left for row, count in tokens.items())
            assert len(tokens) * max(tokens.values()) <= self.chunk
            self.chunks_since_decode += bool(decoding)
            assert self.chunks_since_decode <= 1, "a running row waits for one chunk at most"
        elif act.rows:
            assert set(act.rows) == decoding
            self.chunks_since_decode = 0
        else:
            assert not self.rows
        follow(self.scheduler, act)
        assert self.scheduler.joined == len(self.batch) <= self.max_rows
        assert set(self.scheduler.decoding) == self.decoding
        suspended = {row for row in self.scheduler.rows if row.stage is Stage.SUSPENDED}
        assert suspended == self.suspended
        if not self.decoding:
            self.chunks_since_decode = 0
        return bool(act.row or act.chunk or act.rows)

    def _check_move(self, row: Row, decoding: set[Row]) -> None:
        match row.stage:
            case Stage.READING:
                assert row not in self.batch | self.suspended
                self.batch.add(row)
            case Stage.SUSPENDED:
                assert row in decoding
                assert row.level == BULK
                assert any(r.level == HIGH for r in set(self.rows.values()) - self.batch)
                self.batch.remove(row)
                self.suspended.add(row)
            case Stage.DECODING:
                assert row in self.suspended
                self.suspended.remove(row)
                self.batch.add(row)
            case Stage.WAITING:
                assert row in self.suspended
                assert len(self.batch) + 1 + len(self.suspended) > self.memory, "it is in the way"
                assert row.left == row.length - 1
                self.suspended.remove(row)
        if row.in_batch:
            assert self.scheduler.room == self.memory - len(self.batch) - len(self.suspended)
            assert len(self.batch) == 1 or len(self.batch) + len(self.suspended) <= self.memory


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.sampled_from((BULK, BULK, HIGH, DEFAULT))),
        st.tuples(st.just("act"), st.just(0), st.integers(1, 20)),
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
                    model.act()
            case _:
                model.remove(f"row-{number}")
    # Whatever happened, all rows get their act once those before them have left.
    for _ in range(5000):
        if not model.act():
            break
        for row in list(model.decoding):
            model.remove(row.row_id)
    assert not model.rows
