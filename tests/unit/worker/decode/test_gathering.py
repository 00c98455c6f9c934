"""Bulk rows gather before they join decoding ones."""

from __future__ import annotations

from omlx_worker.decode.row import BULK, DEFAULT
from tests.helpers.scheduling import Rows


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
