"""omlx-submit run and retry as processes: files, exit codes, signals, status lines."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.helpers.bulk_runs import (
    batch_line,
    count_lines,
    errors,
    ids,
    jobs_in_redis,
    lines,
    spawn,
    submit,
    wait_for_model,
    write_jsonl,
    write_rows,
)
from tests.helpers.workers import wait_for, worker_process


@pytest.fixture
def worker(redis_url: str, connection: redis.Redis) -> Iterator[None]:
    with worker_process(redis_url, max_rows=16, step_seconds=0.002):
        wait_for_model(connection)
        yield


@pytest.mark.usefixtures("worker")
def test_a_run_ends_with_0_and_running_it_again_does_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 40)
    code, out, err = submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
    assert (code, out) == (0, ""), err
    summary = json.loads(err.splitlines()[-1])
    assert (summary["type"], summary["rows"], summary["ok"]) == ("summary", 40, 40)
    assert summary["completion_tokens"] > 100
    before = (tmp_path / "out.jsonl").read_bytes()
    code, _, err = submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
    assert code == 0
    assert json.loads(err.splitlines()[-1])["done_before"] == 40
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.usefixtures("worker")
def test_an_edited_row_runs_again_and_has_one_line(redis_url: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    rows = [batch_line(f"r{n}", f"prompt {n}") for n in range(10)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
    before = {line["custom_id"]: line for line in lines(output)}
    rows[4]["body"]["prompt"] = "edited"
    write_jsonl(tmp_path / "rows.jsonl", rows)
    code, _, err = submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl", "--ordered")
    assert code == 0, err
    after = {line["custom_id"]: line for line in lines(output)}
    assert ids(output) == [f"r{n}" for n in range(10)]
    assert {name for name in after if after[name] != before[name]} == {"r4"}


@pytest.mark.usefixtures("worker")
def test_bad_rows_are_told_with_their_lines_and_stop_no_other(
    redis_url: str, tmp_path: Path
) -> None:
    rows = [batch_line("a"), "nonsense", batch_line("a"), batch_line("b", temperature=9)]
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    for _ in range(2):
        code, _, err = submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
        assert code == 1
        assert ids(tmp_path / "out.jsonl") == ["a"]
        assert [
            (line["custom_id"], line["error"]["code"]) for line in errors(tmp_path / "out.jsonl")
        ] == [(None, "unparsable"), ("a", "duplicate_custom_id"), ("b", "invalid_request")]
    assert "3 rows failed; another try would fail too; correct the input" in err


@pytest.mark.usefixtures("worker")
def test_retry_runs_the_failures_again_and_only_those(redis_url: str, tmp_path: Path) -> None:
    # The fake engine's context has 10,000 tokens; the producer knows it too late for this model.
    good = [batch_line(f"r{n}", f"prompt {n}") for n in range(5)]
    failing = batch_line("long", "x" * 9_990, max_tokens=50)
    write_jsonl(tmp_path / "rows.jsonl", [*good, failing])
    code, _, err = submit(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
    assert code == 1, err
    assert [line["error"]["code"] for line in errors(tmp_path / "out.jsonl")] == ["invalid_request"]
    code, _, err = submit(redis_url, tmp_path, "retry", "out.jsonl", "--refused")
    assert code == 1
    assert json.loads(err.splitlines()[-2])["rows"] == 1
    assert len(errors(tmp_path / "out.jsonl")) == 1
    # Once its cause is gone, it moves from the errors to the results.
    failing["body"]["max_tokens"] = 5
    write_jsonl(tmp_path / "rows.jsonl", [*good, failing])
    code, _, err = submit(redis_url, tmp_path, "retry", "out.jsonl", "--ordered")
    assert code == 0, err
    assert ids(tmp_path / "out.jsonl") == [*(f"r{n}" for n in range(5)), "long"]
    assert errors(tmp_path / "out.jsonl") == []


@pytest.mark.usefixtures("worker")
def test_csv_goes_in_and_out(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('key,text\nk1,"a, b"\nk2,c\n')
    code, _, err = submit(
        redis_url,
        tmp_path,
        *("run", "rows.csv", "-o", "out.csv", "--template", "Summarise: {text}"),
        *("--id-field", "key", "--max-completion-tokens", "7", "--ordered"),
    )
    assert code == 0, err
    with (tmp_path / "out.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["custom_id"] for row in rows] == ["k1", "k2"]
    assert rows[0]["prompt_tokens"] == str(len("Summarise: a, b"))
    assert int(rows[0]["completion_tokens"]) in (6, 7)


@pytest.mark.usefixtures("worker")
def test_prompts_come_from_stdin(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\n\ntwo\n")
    with (tmp_path / "prompts").open() as stdin:
        run = ("run", "-", "--format", "text", "-o", "out.jsonl", "--max-tokens", "3")
        process = spawn(redis_url, tmp_path, *run, stdin=stdin)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert sorted(ids(tmp_path / "out.jsonl")) == ["row-1", "row-3"]


@pytest.mark.usefixtures("worker")
def test_several_clients_share_one_redis(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 60)
    outputs = [f"out{n}.jsonl" for n in range(3)]
    clients = [spawn(redis_url, tmp_path, "run", "rows.jsonl", "-o", name) for name in outputs]
    for client in clients:
        _, err = client.communicate(timeout=60)
        assert client.returncode == 0, err
    for name in outputs:
        assert sorted(ids(tmp_path / name)) == sorted(f"r{n}" for n in range(60))
    assert jobs_in_redis(connection) == 0


def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    write_rows(tmp_path / "rows.jsonl", 200, max_tokens=20)
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        run = ("run", "rows.jsonl", "-o", "out.jsonl", "--window", "50")
        process = spawn(redis_url, tmp_path, *run)
        wait_for(lambda: count_lines(output) > 20)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "continue with: omlx-submit run rows.jsonl -o out.jsonl --window 50" in err
        assert 20 < count_lines(output) < 200
        assert f"interrupted: {200 - count_lines(output)} rows have no result; continue" in err
        # Nothing is left in Redis for workers to go on with.
        assert jobs_in_redis(connection) == 0
        code, _, err = submit(redis_url, tmp_path, *run)
    assert code == 0, err
    assert sorted(ids(output)) == sorted(f"r{n}" for n in range(200))


def test_a_run_whose_batch_is_cancelled_says_by_whom_and_goes_on_when_repeated(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    write_rows(tmp_path / "rows.jsonl", 200, max_tokens=20)
    with worker_process(redis_url, max_rows=8, step_seconds=0.01):
        wait_for_model(connection)
        run = ("run", "rows.jsonl", "-o", "out.jsonl")
        process = spawn(redis_url, tmp_path, *run)
        wait_for(lambda: count_lines(output) > 20)
        ((_, batch),) = [key.split(b":")[1:] for key in connection.keys("omlx:batch:????????????")]
        code, out, _ = submit(redis_url, tmp_path, "cancel", f"batch-{batch.decode()}")
        assert (code, out) == (0, "cancelled\n")
        _, err = process.communicate(timeout=30)
        assert process.returncode == 130
        by = rf"batch-{batch.decode()} was cancelled by \S+@\S+"
        assert errors(output) == []
        assert 20 < count_lines(output) < 200
        left = f"{200 - count_lines(output)} rows have no result"
        assert f"0 failed; {left}\n" in err
        told = rf"{by}: {left}, the first of them line \d+, id 'r\d+'; continue with: omlx-submit"
        assert re.search(told, err)
        assert jobs_in_redis(connection) == 0
        code, _, err = submit(redis_url, tmp_path, *run)
    assert code == 0, err
    assert sorted(ids(output)) == sorted(f"r{n}" for n in range(200))


def test_a_second_interrupt_leaves_at_once(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 20, max_tokens=9_000)
    with worker_process(redis_url, max_rows=4, step_seconds=0.05):
        wait_for_model(connection)
        process = spawn(redis_url, tmp_path, "run", "rows.jsonl", "-o", "out.jsonl")
        wait_for(lambda: jobs_in_redis(connection) == 4)
        process.send_signal(signal.SIGINT)
        # Those that run are waited for, and would be for minutes.
        wait_for(lambda: not connection.keys("omlx:batch:*:waiting:*"))
        assert jobs_in_redis(connection) == 4
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert err.count("continue with: omlx-submit run rows.jsonl -o out.jsonl") == 1
    assert "Traceback" not in err


@pytest.mark.usefixtures("worker")
def test_a_bar_shows_rows_tokens_and_the_end(redis_url: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 30)
    code, _, err = submit(
        redis_url, tmp_path, "run", "rows.jsonl", "-o", "o.jsonl", "--progress", "bar"
    )
    assert code == 0
    assert "30/30" in err
    assert "tok/s in" in err
    assert "30 rows in" in err
