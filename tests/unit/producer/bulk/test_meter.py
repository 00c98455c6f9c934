"""What a run says about itself: counts, rates, acceptance, the time that is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from omlx_producer.bulk import progress as progress_module
from omlx_producer.bulk.batch import BatchState
from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.bulk.progress import (
    StatusLines,
    figures,
    make_display,
    summary_text,
)
from omlx_producer.bulk.row import RowResult, RowUsage
from omlx_producer.terminal import duration
from tests.helpers.clock import Clock
from tests.helpers.row_results import failed, ok, row


def result(
    prompt: int, completion: int, drafted: int = 0, accepted: Any = (), cached: int = 0
) -> RowResult:
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculation": {"steps": 1, "drafted": drafted, "accepted": list(accepted)},
    }
    return RowResult(row("a"), "bulk-1-1", body={"usage": usage})


def test_rows_tokens_and_drafts_are_counted() -> None:
    meter = Meter(total=10)
    meter.count([result(3, 5, 4, [2, 1]), result(7, 5, 4, [2]), failed("b"), failed("c"), ok("d")])
    end = meter.summary()
    assert (end["rows"], end["ok"], end["failed"]) == (5, 3, 2)
    assert end["failures"] == {"failed": 2}
    assert (end["prompt_tokens"], end["completion_tokens"]) == (11, 12)
    assert end["acceptance"] == pytest.approx(5 / 8, abs=1e-3)


def test_prompt_tokens_that_were_not_read_are_counted() -> None:
    meter = Meter()
    meter.count([result(30, 5), ok("of an older worker")])
    assert meter.summary()["cached_tokens"] == 0
    assert "cached" not in summary_text(meter.summary())
    meter.count([result(70, 5, cached=49)])
    assert meter.summary()["cached_tokens"] == 49
    shown = re.sub("[0-9]+/s", "N/s", summary_text(meter.summary())).splitlines()[-1]
    assert shown == "tokens: 101 in (N/s, 49% cached), 12 out (N/s)"


def test_without_drafts_there_is_no_acceptance() -> None:
    meter = Meter()
    meter.count([ok("a")])
    assert meter.summary()["acceptance"] is None
    assert not any("accepted" in figure for figure in figures(meter))


def test_rates_are_those_of_the_last_half_minute() -> None:
    clock = Clock()
    meter = Meter(total=1_000, clock=clock)
    for second in range(120):
        clock.now += 1
        meter.count([result(10, 20 if second < 60 else 40)])
    rows, tokens_in, tokens_out = meter.rates()
    assert rows == pytest.approx(1)
    assert tokens_in == pytest.approx(10)
    assert tokens_out == pytest.approx(40)
    assert meter.eta() == pytest.approx(880)
    assert len(meter._marks) < 40


def test_rows_that_were_done_before_are_neither_left_nor_fast() -> None:
    clock = Clock()
    meter = Meter(total=200, before=90, clock=clock)
    clock.now += 2
    meter.count([ok("a")] * 20)
    assert meter.eta() == pytest.approx(9)
    assert meter.snapshot()["done"] == 110


def test_how_long_the_rest_takes_is_told_after_20_rows_however_slow_they_are() -> None:
    clock = Clock()
    meter = Meter(total=1020, clock=clock)
    for done in range(1, 26):
        clock.now += 20
        meter.count([result(10, 620)])
        assert (meter.eta() is not None) == (done >= 20)
        told = f"about {duration(20 * (1020 - done))} left"
        assert (told in figures(meter)) == (done >= 20)
    assert figures(meter)[0] == "about 5 h 31 min left"


def test_without_a_total_nobody_knows_how_long_it_takes() -> None:
    meter = Meter()
    meter.count([ok("a")])
    assert meter.eta() is None
    assert meter.snapshot()["eta_seconds"] is None


def test_a_status_line_comes_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", clock)
    lines, meter = StatusLines(), Meter(total=2)
    for _ in range(12):
        clock.now += 1
        lines.update(meter)
    lines.end(meter)
    shown = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["type"] for line in shown] == ["progress", "progress", "summary"]


def test_before_the_first_row_ends_the_figures_are_those_of_the_workers() -> None:
    clock = Clock()
    meter = Meter(total=10, clock=clock)
    clock.now += 75
    assert figures(meter) == ["0 tok/s in, 0 out", "after 1 min 15 s"]
    meter.now = Speed(running=8, tokens_in=120.4, tokens_out=40)
    assert figures(meter) == ["8 running", "120 tok/s in, 40 out", "after 1 min 15 s"]
    shown = meter.snapshot()
    assert (shown["running"], shown["seconds"]) == (8, 75)
    assert shown["completion_tokens_per_second"] == 40


def test_off_a_terminal_the_summary_is_readable_and_then_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    meter = Meter()
    meter.count([ok("a")])
    make_display("auto").end(meter)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("1 row in ")
    assert json.loads(last)["type"] == "summary"
    make_display("ndjson").end(meter)
    (only,) = capsys.readouterr().err.splitlines()
    assert json.loads(only)["rows"] == 1


def test_the_summary_says_which_fields_were_ignored() -> None:
    meter = Meter()
    assert "ignored" not in summary_text(meter.summary())
    meter.ignored.update(user=1200, metadata=3)
    assert summary_text(meter.summary()).endswith(
        "\nrows with ignored fields: user 1,200, metadata 3"
    )
    assert meter.summary()["ignored_fields"] == {"user": 1200, "metadata": 3}


def test_the_summary_says_how_rows_failed() -> None:
    meter = Meter()
    meter.count([ok("a"), failed("b")])
    text = summary_text(meter.summary())
    assert "2 rows in" in text
    assert "1 ok, 1 failed" in text
    assert "\n  1 failed\n" in text


def test_the_figures_of_a_batch_are_those_of_its_own_time() -> None:
    meter = Meter()

    meter.adopt(
        BatchState(
            id="a",
            state="done",
            rows=9,
            ok=9,
            failures={},
            left=0,
            usage=RowUsage(prompt_tokens=1_000, completion_tokens=500, cut_by_length=3),
            queues=(),
            created_at=100.0,
            ended_at=110.0,
        )
    )

    end = meter.summary()
    assert (end["seconds"], end["completion_tokens_per_second"]) == (10.0, 50.0)
    assert end["cut_by_length"] == 3


def test_rows_that_were_cut_by_length_are_counted_and_told() -> None:
    meter = Meter()
    meter.count([ok("b")])
    assert "cut" not in summary_text(meter.summary())
    meter.count([ok("a", ends=("stop", "length"))])
    assert meter.snapshot()["cut_by_length"] == meter.summary()["cut_by_length"] == 1
    assert "\n1 row cut by length; give them more tokens with --max-" in summary_text(
        meter.summary()
    )


def test_rows_that_ended_because_they_repeated_themselves_are_counted_and_told() -> None:
    meter = Meter()
    meter.count([ok("a", ends=["repetition"]), ok("b")])
    end = meter.summary()
    assert (end["ok"], end["cut_by_length"], end["cut_by_repetition"]) == (2, 0, 1)
    assert "\n1 row cut by repetition; give a temperature, " in summary_text(meter.summary())


def test_the_last_line_says_where_it_is() -> None:
    meter = Meter(before=4)
    meter.count([ok("a")])
    meter.files = {Path("out.csv"): 6, Path("out.csv.jsonl"): 5}
    last = summary_text(meter.summary()).splitlines()[-1]
    assert last == "written: out.csv (6 rows), out.csv.jsonl (5 rows)"
    assert meter.summary()["files"] == {"out.csv": 6, "out.csv.jsonl": 5}
