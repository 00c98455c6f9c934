"""The commands about detached batches, from wherever they are typed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer import UnknownJob
from omlx_producer.bulk.batch import Batch, BatchState, is_batch_id
from omlx_producer.bulk.collector import Collector
from omlx_producer.bulk.row import BadRow
from omlx_producer.bulk.store import Store
from omlx_worker.queue.claim import Claim
from omlx_worker.queue.ending import Ending
from tests.helpers.bulk_rows import RUN, Kept, batch_of, batches_of_run, rows
from tests.helpers.bulk_runs import (
    errors,
    ids,
    write_rows,
)
from tests.helpers.leases import claim, commit, done, failed, table
from tests.helpers.row_results import body
from tests.helpers.workers import ALIAS, run_burst
from tests.integration.producer.bulk.conftest import Run


def test_the_commands_reach_a_batch_from_anywhere(
    redis_url: str, connection: redis.Redis, tmp_path: Path, run: Run
) -> None:
    source, output = write_rows(tmp_path / "rows.jsonl", 40), tmp_path / "out.jsonl"
    with source.open("a") as stream:
        stream.write("nonsense\n")
    detached = run("run", str(source), "--detach")
    assert detached.exit_code == 0, detached.output
    batch_id = detached.stdout.strip()
    assert is_batch_id(batch_id)
    status = json.loads(run("status", batch_id, "--json").output)
    assert (status["state"], status["rows"], status["failures"]) == ("open", 41, {"unparsable": 1})
    run_burst(redis_url)
    watched = run("watch", batch_id, "--json")
    assert watched.exit_code == 1
    assert json.loads(watched.stderr)["ok"] == 40
    fetched = run("results", batch_id, "--keep", "-o", str(output))
    assert fetched.exit_code == 1
    assert ids(output) == [f"r{n}" for n in range(40)]
    assert [line["error"]["line"] for line in errors(output)] == [41]
    assert len(run("results", batch_id).stdout.splitlines()) == 41


def test_a_cancelled_batch_that_its_run_deletes_at_once_is_told_to_be_cancelled(
    connection: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector(connection, RUN, rows(3), Kept())
    collector.turn(0.01)
    [batch] = batches_of_run(connection)
    leases = table(connection)
    [job] = claim(leases)

    def end(_: float) -> None:
        commit(leases, job, done(job.id))
        while collector.busy:
            collector.turn(0.0)

    monkeypatch.setattr("omlx_producer.cli.batch.time.sleep", end)
    told = run("cancel", batch.id)
    assert (told.exit_code, told.stdout) == (0, "cancelled\n"), told.stderr


def test_the_commands_take_the_id_that_the_gateway_has_of_a_batch(
    connection: redis.Redis, run: Run
) -> None:
    batch = batch_of(connection, 1)
    other = batch.id.replace("-", "_")
    assert json.loads(run("status", other, "--json").stdout)["id"] == batch.id
    assert run("results", other, "--partial").exit_code == 0
    assert run("cancel", other).stdout == "cancelled\n"
    assert batch.read().state == "cancelled"
    assert run("delete", other).exit_code == 0
    with pytest.raises(UnknownJob):
        batch.read()


def test_the_times_of_a_batch_are_for_people_or_with_json_for_programs(
    connection: redis.Redis, run: Run
) -> None:
    batch = batch_of(connection, 1)
    connection.hset(batch.key, "created_at", "1700000000.5")
    shown = run("status", batch.id).stdout
    local = datetime.fromtimestamp(1700000000).astimezone()
    assert f"created_at        {local:%Y-%m-%d %H:%M:%S %Z}\n" in shown
    assert json.loads(run("status", batch.id, "--json").stdout)["created_at"] == 1700000000.5


def test_the_status_of_a_batch_has_its_failures_in_words_and_no_zeros_of_what_is_unused(
    connection: redis.Redis, run: Run
) -> None:
    batch = Batch.create(connection)
    batch.upload([BadRow(line, None, "unparsable", "not JSON", "0" * 24, False) for line in (1, 2)])
    shown = dict(line.split(maxsplit=1) for line in run("status", batch.id).stdout.splitlines())
    assert (shown["rows"], shown["ok"], shown["failures"]) == ("2", "0", "2 unparsable")
    assert not {"drafted", "accepted", "cached_tokens", "prompt_tokens"} & set(shown)


def test_results_before_the_end_say_how_many_are_missing_and_end_with_4(
    connection: redis.Redis, run: Run, tmp_path: Path
) -> None:
    batch, leases = batch_of(connection, 120), table(connection)
    none = run("results", batch.id, "-o", str(tmp_path / "none.jsonl"))
    assert none.stderr == f"{batch.id}: open, 0 of 120 rows ended\n"
    (claimed,) = claim(leases)
    commit(leases, claimed, finished(claimed, body()))
    early, said = run("results", batch.id), f"{batch.id}: open, 1 of 120 rows ended\n"
    assert (early.exit_code, early.stderr) == (4, said)
    assert len(early.stdout.splitlines()) == 1
    output = tmp_path / "out.jsonl"
    assert run("results", batch.id, "-o", str(output)).exit_code == 4
    assert ids(output) == [claimed.row.custom_id]
    meant = run("results", batch.id, "--partial")
    assert (meant.exit_code, meant.stderr) == (0, said)
    batch.cancel()
    cancelled = run("results", batch.id)
    assert (cancelled.exit_code, cancelled.stderr) == (
        1,
        f"{batch.id}: cancelled, 1 of 120 rows ended; 119 rows have no result\n",
    )
    assert run("results", batch.id, "--partial").exit_code == 0


def finished(job: Claim, body: dict[str, Any]) -> Ending:
    return replace(done(job.id), result=body)


def settle(batch: Batch, body: dict[str, Any] | None = None) -> None:
    """End all rows of a batch alike; without a body they fail."""
    leases = table(batch.connection)
    while claimed := claim(leases, 8):
        for job in claimed:
            commit(leases, job, failed(job.id, "why") if body is None else finished(job, body))


def test_results_leave_redis_once_they_are_in_a_file(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    batch, output = batch_of(connection, 3), tmp_path / "out.jsonl"
    run("results", batch.id, "-o", str(output), "--partial")
    assert connection.exists(batch.key)
    settle(batch, body())
    run("results", batch.id)
    run("results", batch.id, "-o", str(output), "--keep")
    assert connection.hlen(batch.results_key) == 3
    with contextlib.chdir(tmp_path):
        run("results", batch.id, "-o", "out.jsonl")
    assert not connection.exists(batch.results_key)
    lines = output.read_text()
    assert lines.count("\n") == 3
    again = run("results", batch.id, "-o", str(output))
    assert again.exit_code == 0
    assert output.read_text() == lines
    other = run("results", batch.id, "-o", str(tmp_path / "other.jsonl"))
    assert other.exit_code == 2
    assert "left Redis at" in other.stderr
    assert f":{output}; use that file" in other.stderr
    assert "fetched_to" in run("status", batch.id).stdout


def test_results_of_which_some_are_missing_are_not_written_nor_dropped(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    batch, output = batch_of(connection, 3), tmp_path / "out.jsonl"
    settle(batch, body())
    connection.hdel(batch.results_key, "2")
    fetched = run("results", batch.id, "-o", str(output))
    assert fetched.exit_code == 2
    assert "1 of 3 results are not in Redis any more" in fetched.stderr
    assert not list(tmp_path.iterdir())
    assert connection.hlen(batch.results_key) == 2
    assert batch.read().fetched_to == ""
    shown = run("results", batch.id)
    assert (shown.exit_code, len(shown.stdout.splitlines())) == (2, 2)


def test_results_that_another_command_fetches_meanwhile_are_told(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.batch.ROWS_AT_ONCE", 2)
    batch = batch_of(connection, 5)
    settle(batch, body())
    lines = batch.results(batch.read())
    next(lines)
    batch.drop_results("another")
    with pytest.raises(UnknownJob, match="3 of 5 results are not in Redis any more: they were"):
        list(lines)


def test_a_batch_with_a_broken_field_is_told_and_holds_up_no_others(
    connection: redis.Redis, run: Run
) -> None:
    broken, good = batch_of(connection, 2), batch_of(connection, 2)
    connection.hset(broken.key, "rows", "many")
    listed = map(json.loads, run("batches", "--json").stdout.splitlines())
    assert {each["id"]: each["state"] for each in listed} == {broken.id: "broken", good.id: "open"}
    told = run("status", broken.id)
    assert told.exit_code != 0
    assert "rows: got 'many' in Redis; set a number, or delete the batch" in told.stderr
    assert run("delete", broken.id).exit_code == 0
    assert not connection.keys(f"{broken.key}*")


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_results_of_another_batch_are_not_replaced(
    connection: redis.Redis, run: Run, tmp_path: Path, name: str
) -> None:
    # The same rows, so nothing but their jobs tells the batches apart.
    first, second, output = batch_of(connection, 2), batch_of(connection, 2), tmp_path / name
    for batch in (first, second):
        settle(batch, body())
    said = run("results", first.id, "-o", str(output)).stderr
    kept = output.read_bytes()
    refused = run("results", second.id, "-o", str(output))
    assert refused.exit_code == 2
    assert "line 1 is no result of this batch and would be lost; give another" in refused.stderr
    assert output.read_bytes() == kept
    assert run("results", first.id, "-o", str(output)).exit_code == 0
    assert output.read_bytes() == kept
    assert f"written: {output} (2 rows)" in said.replace(f"{output}.jsonl (2 rows), ", "")


def test_a_batch_counts_its_rows_that_were_cut_by_length(connection: redis.Redis, run: Run) -> None:
    batch, cut = batch_of(connection, 3), body()
    cut["choices"][0]["finish_reason"] = "length"
    settle(batch, cut)
    assert json.loads(run("status", batch.id, "--json").stdout)["usage"]["cut_by_length"] == 3
    assert "\ncut_by_length     3\n" in run("status", batch.id).stdout
    assert "3 rows cut by length; " in run("watch", batch.id).stderr


def test_errors_of_another_batch_and_lines_of_something_else_are_not_replaced(
    connection: redis.Redis, run: Run, tmp_path: Path
) -> None:
    first, second = Batch.create(connection), Batch.create(connection)
    first.upload(rows(2))
    second.upload(rows(2, start=2))
    settle(first)
    settle(second, body())
    output = tmp_path / "out.jsonl"
    said = f"written: {output}.errors.jsonl (2 rows)\n"
    assert said in run("results", first.id, "--keep", "-o", str(output)).stderr
    refused = run("results", second.id, "-o", str(output))
    assert refused.exit_code == 2
    assert "out.jsonl.errors.jsonl: line 1 is no result of this batch" in refused.stderr
    assert run("results", first.id, "--keep", "-o", str(output)).exit_code == 1
    with output.open("a") as stream:
        stream.write("precious\n")
    assert (
        "line 1 is no result of this batch"
        in run("results", first.id, "--keep", "-o", str(output)).stderr
    )
    assert output.read_text() == "precious\n"


def test_a_table_of_a_batch_has_its_failures_in_their_places(
    connection: redis.Redis, run: Run, tmp_path: Path
) -> None:
    batch = Batch.create(connection)
    bad = BadRow(2, None, "unparsable", "line 2: not JSON", "0" * 24, False)
    batch.upload([*rows(1), bad, *rows(1, start=1)])
    choice = {"index": 0, "text": "t", "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    body = {"choices": [choice], "usage": usage}
    settle(batch, body)
    output = tmp_path / "out.csv"
    assert run("results", batch.id, "--keep", "-o", str(output)).exit_code == 1
    assert output.read_text().splitlines() == [
        "custom_id,text,finish_reason,prompt_tokens,completion_tokens,error",
        "r0,t,stop,3,4,",
        ",,,,,unparsable: line 2: not JSON",
        "r1,t,stop,3,4,",
    ]
    run("results", batch.id, "--keep", "-o", str(output), "--with-body")
    assert output.read_text().splitlines()[0].endswith(",error,response")
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"name": {}}}')
    run("results", batch.id, "-o", str(output), "--schema", str(schema))
    assert output.read_text().splitlines()[0].endswith(",error,name")


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.errors.jsonl"])
def test_results_replace_no_file_of_something_else(
    connection: redis.Redis, run: Run, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("precious")
    source = str(write_rows(tmp_path / "rows.jsonl", 1))
    for command, said in (
        (("results", batch_of(connection, 1).id, "--partial"), "line 1 is no result of this batch"),
        (("run", source), "exists and is of no run of omlx-submit"),
    ):
        done = run(*command, "-o", str(tmp_path / "out.jsonl"))
        assert done.exit_code == 2
        assert f"{name}: {said}" in done.stderr
        assert (tmp_path / name).read_text() == "precious"


@pytest.mark.parametrize("args", [(), ("-o", "results.jsonl"), ("--wait",)])
def test_the_results_of_a_run_are_in_the_output_of_its_command(
    connection: redis.Redis, run: Run, args: tuple[str, ...]
) -> None:
    Collector(connection, RUN, rows(3), Kept()).turn(0)
    (batch,) = batches_of_run(connection)
    told = run("results", batch.id, *args)
    assert (told.exit_code, told.stdout) == (2, "")
    assert f"{batch.id}: is a batch of a run, whose command writes the results" in told.stderr


def test_results_replace_no_output_of_a_run(
    connection: redis.Redis, run: Run, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with contextlib.closing(Store(output)):
        pass
    kept = write_rows(output, 1).read_text()
    done = run("results", batch_of(connection, 1).id, "--partial", "-o", str(output))
    assert done.exit_code == 2
    assert f"--output: {output} belongs to an omlx-submit run; give another" in done.stderr
    assert output.read_text() == kept


def test_a_batch_that_is_none_is_told(run: Run) -> None:
    for command in ("status", "watch", "results", "cancel"):
        done = run(command, "batch-0123456789ab")
        assert done.exit_code == 2
        assert "no batch has the id" in done.stderr


def test_the_command_for_a_jobs_result_names_that_for_a_batch(run: Run) -> None:
    done = run("result", "batch-0123456789ab")
    assert done.exit_code == 2
    assert "is a batch; see omlx-submit results batch-0123456789ab" in done.stderr


def test_looking_at_no_batch_raises(connection: redis.Redis) -> None:
    with pytest.raises(UnknownJob):
        Batch(connection, "batch-0123456789ab").read()


def test_who_watches_a_batch_that_nobody_serves_is_told_so_once(
    connection: redis.Redis, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.progress.FIGURES_SECONDS", 0.0)
    monkeypatch.setattr("omlx_producer.bulk.detached.WAIT_SECONDS", 0.02)
    batch = batch_of(connection, 1)
    known, read = iter(range(6)), Batch.read

    def read_a_few_times(self: Batch) -> BatchState:
        if next(known, None) is None:
            monkeypatch.setattr(Batch, "read", read)
            self.cancel()
        return read(self)

    monkeypatch.setattr(Batch, "read", read_a_few_times)
    watched = run("watch", batch.id)
    assert watched.stderr.count(f"no worker serves {ALIAS}; rows wait") == 1
