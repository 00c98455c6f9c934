"""The head reads prompts and tails when somebody drafts, and not before."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from omlx_worker.engine.ragged import backlog
from omlx_worker.engine.ragged import decoder as ragged
from omlx_worker.engine.ragged.attention_cache import TAIL
from omlx_worker.engine.ragged.backlog import Backlog
from tests.helpers.decoding import Loaded, row
from tests.unit.worker.engine.ragged.test_cache import Driver


class Reads:
    """Counts what the head reads late: pieces of prompts or bodies, and positions of tails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bodies = self.tails = 0
        by_head, read_piece = RaggedQwen35.read_by_head, Backlog._read_piece

        def body(model, *args):  # type: ignore[no-untyped-def]
            self.bodies += 1
            by_head(model, *args)

        def tails(kept, width, begins):  # type: ignore[no-untyped-def]
            self.tails += width
            read_piece(kept, width, begins)

        monkeypatch.setattr(RaggedQwen35, "read_by_head", body)
        monkeypatch.setattr(Backlog, "_read_piece", tails)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize("most", [backlog.MOST_UNREAD, 300, 8])
def test_what_the_head_reads_late_is_what_it_would_have_read_at_once(
    qwen: Loaded, most: int
) -> None:
    driver = Driver(qwen, seed=3, tokens=2 * TAIL + 100)
    with patch.object(backlog, "MOST_UNREAD", most), patch.object(ragged, "MOST_UNREAD", most):
        for length in (1, 12, 270):
            driver.join(length, None)
        driver.step(1.0, 3, 2)
        driver.step(0.0, TAIL, 0)
        driver.join(40, None)
        driver.step(0.0, 20, 0)
        driver.suspend(1)
        driver.step(0.0, 20, 0)
        driver.resume(1)
        driver.step(0.0, 20, 0)
        driver.catch_up()
        driver.step(0.0, TAIL, 0)
        driver.catch_up()
        driver.step(1.0, 5, 3)
        driver.catch_up()

    assert driver.checked == 4 + 4 + 4


def test_rows_that_never_draft_are_never_read_by_the_head(qwen: Loaded, reads: Reads) -> None:
    driver = Driver(qwen, seed=1, tokens=TAIL + 100)
    for length in (30, 5):
        driver.join(length, None)
    driver.step(0.0, TAIL + 50, 0)

    assert (reads.bodies, reads.tails) == (0, 0)


def test_a_row_is_read_once_however_often_drafting_begins_again(qwen: Loaded, reads: Reads) -> None:
    driver = Driver(qwen, seed=1)
    for length in (30, 5):
        driver.join(length, None)
    driver.step(0.0, 10, 0)
    for _ in range(3):
        driver.step(0.0, 5, 2)
        driver.step(0.0, 5, 0)

    assert reads.bodies == 2


def test_what_few_steps_missed_is_few_positions_wherever_the_rows_are(
    qwen: Loaded, reads: Reads
) -> None:
    driver = Driver(qwen, seed=1, tokens=TAIL)
    driver.join(30, None)
    driver.step(0.0, 150, 2)
    driver.step(0.0, 3, 0)
    driver.join(5, None)
    driver.step(0.0, 3, 0)
    driver.step(0.0, 3, 2)

    assert reads.tails <= 16
    driver.catch_up()
    assert driver.checked == 2


def test_the_head_reads_after_so_many_positions_whether_anybody_drafts_or_not(
    qwen: Loaded, reads: Reads
) -> None:
    driver = Driver(qwen, seed=1, tokens=2 * TAIL + 50)
    driver.join(30, None)
    with patch.object(backlog, "MOST_UNREAD", TAIL + 40):
        driver.step(0.0, 2 * TAIL + 20, 0)

    assert reads.bodies == 1


def test_prompts_beyond_that_are_read_along(qwen: Loaded, reads: Reads) -> None:
    decoder = qwen.decoder(2, varies=True)
    with patch.object(ragged, "MOST_UNREAD", 40):
        decoder.add(row("x", [1] * 41, 10))
    decoder.prefill("x", 20)

    assert reads.bodies == 1


def test_what_is_kept_for_the_head_of_a_suspended_row_is_counted(qwen: Loaded) -> None:
    decoder = qwen.decoder(2, varies=True)
    decoder.add(row("x", [1] * 200, 50))
    decoder.prefill("x", 200)
    for _ in range(3):
        decoder.step({"x": 0})
    decoder.suspend("x")

    _, snapshot = decoder.batch._suspended["x"]
    kept = decoder.suspended_bytes("x") - snapshot.nbytes
    assert kept >= 199 * decoder._model.hidden * decoder._model.dtype.size
