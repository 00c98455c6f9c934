"""Answers that hold a marker of their model's chats are told while the run can still be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from omlx_producer.client.workers import read_workers
from tests.helpers import fake_engine, workers
from tests.helpers.bulk_runs import count_lines, write_rows
from tests.helpers.workers import ALIAS, running_worker, wait_for
from tests.integration.producer.bulk.conftest import Run

LEAK = "<|end|>analysis"
Answers = Callable[..., None]


class Announcing(fake_engine.FakeEngine):
    """An engine of a model with markers."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.info = self.info.model_copy(update={"markers": ("</think>", "<|end|>")})


@pytest.fixture
def answers(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """Says what a worker answers to rows whose prompts end in these digits, and to the others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "FakeEngine", Announcing)

    def say(digits: str, text: str, others: str = "fine") -> None:
        def expected(row: fake_engine.Row) -> tuple[list[int], str]:
            answer = text if chr(row.prompt[-1]) in digits else others
            return list(map(ord, answer)), answer

        monkeypatch.setattr(fake_engine, "expected", expected)

    with running_worker(redis_url), redis.Redis.from_url(redis_url) as connection:
        wait_for(lambda: read_workers(connection, ALIAS))
        yield say


def told(run: Run, folder: Path, rows: int) -> list[str]:
    """What a run of this many rows says of markers."""
    write_rows(folder / "rows.jsonl", rows, max_tokens=40)
    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    assert done.exit_code == 0, done.output
    assert count_lines(folder / "out.jsonl") == rows
    return done.stderr.splitlines()


def test_markers_in_the_first_20_answers_are_told_once_with_their_count(
    run: Run, answers: Answers, tmp_path: Path
) -> None:
    answers("0123456789", LEAK)
    assert told(run, tmp_path, 45) == [
        "20 of the first 20 answers hold <|end|>, which no answer of fake should; see: "
        "omlx-worker check -m fake; Ctrl-C stops the run"
    ]


def test_a_short_run_tells_them_at_its_end(run: Run, answers: Answers, tmp_path: Path) -> None:
    answers("13", LEAK)
    assert told(run, tmp_path, 5) == [
        "2 of the first 5 answers hold <|end|>, which no answer of fake should; see: "
        "omlx-worker check -m fake"
    ]


def test_markup_that_is_no_marker_of_the_model_is_text(
    run: Run, answers: Answers, tmp_path: Path
) -> None:
    answers("0123456789", "<div>a</div> <|channel|> [/INST]")
    assert told(run, tmp_path, 25) == []
