"""omlx-submit run against a worker in this process: limits, links, what is advised at the end."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer.bulk import progress
from omlx_producer.bulk.meter import Meter, Speed
from omlx_producer.bulk.options import RunOptions
from omlx_producer.bulk.output import Output
from omlx_producer.bulk.progress import WorkerWatch
from omlx_producer.bulk.row import ID_PREFIX, BadRow, RowResult, write_line
from omlx_producer.bulk.store import Store, errors_path, read_settings, results_path
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import (
    MODELS_KEY,
    GenerationRequest,
    queue_name,
    row_job_id,
)
from omlx_producer.wire.keys import workers_key
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.queue.embedded import free_port
from tests.helpers.bulk_runs import (
    batch_line,
    errors,
    ids,
    jobs_in_redis,
    lines,
    wait_for_model,
    write_jsonl,
    write_rows,
)
from tests.helpers.fake_engine import GOES_ROUND, FakeEngine
from tests.helpers.fake_worker import announce, sign_on
from tests.helpers.image_parts import image, part_of
from tests.helpers.workers import ALIAS, running_worker
from tests.integration.producer.bulk.conftest import Run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def worker(redis_url: str) -> Iterator[None]:
    with running_worker(redis_url):
        yield


@pytest.mark.usefixtures("worker")
def test_a_limited_run_takes_the_first_rows_and_a_later_run_goes_on(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    with write_rows(tmp_path / "rows.jsonl", 30).open("a") as stream:
        stream.write("nonsense\n")
    options = ("run", "rows.jsonl", "-o", "out.jsonl", "--ordered", "--progress", "none")
    assert run(*options, "--limit", "10").exit_code == 0
    assert ids(out) == [f"r{n}" for n in range(10)]
    assert run(*options).exit_code == 1
    assert ids(out) == [f"r{n}" for n in range(30)]
    before = out.read_bytes()
    # The error of a line beyond the limit is no error of a line that is gone.
    assert run(*options, "--limit", "10").exit_code == 1
    assert (out.read_bytes(), len(errors(out))) == (before, 1)
    assert jobs_in_redis(connection) == 0


@pytest.mark.usefixtures("worker")
def test_a_file_of_prompts_is_scored_row_by_row(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3, max_tokens=0, prompt_logprobs=0)
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--ordered", "--progress", "none")
    ended = run(*command)
    assert ended.exit_code == 0
    assert "cut" not in ended.stderr
    for number, line in enumerate(lines(tmp_path / "out.jsonl")):
        [choice] = line["response"]["body"]["choices"]
        text = f"prompt {number}"
        scores = [None, *({str(ord(each)): -ord(each)} for each in text[1:])]
        told = [
            each and {token: entry["logprob"] for token, entry in each.items()}
            for each in choice["prompt_logprobs"]
        ]
        assert told == scores
        assert choice["finish_reason"] == "length"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_run_replaces_its_own_table_but_none_of_something_else(
    run: Run, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("pyarrow")
    write_rows(tmp_path / "rows.jsonl", 2)
    options = ("run", "rows.jsonl", "-o", name, "--progress", "none")
    (tmp_path / name).write_text("precious")
    refused = run(*options)
    assert refused.exit_code == 2
    assert f"{name}: exists and is of no run of omlx-submit; give another" in refused.stderr
    assert [path.name for path in tmp_path.iterdir() if name in path.name] == [name]
    assert (tmp_path / name).read_text() == "precious"
    (tmp_path / name).unlink()
    assert [run(*options).exit_code for _ in range(2)] == [0, 0]


def test_a_limit_is_also_that_of_dry_runs_and_batches(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 30)
    assert '"rows": 7,' in run("run", "rows.jsonl", "--limit", "7", "--dry-run").stdout
    assert '"rows": 30,' in run("run", "rows.jsonl", "--limit", str(2**80), "--dry-run").stdout
    batch = run("run", "rows.jsonl", "--limit", "7", "--detach").stdout.strip()
    assert json.loads(run("status", batch, "--json").stdout)["rows"] == 7


@pytest.mark.usefixtures("worker")
def test_a_retry_has_no_limit_and_keeps_the_body_in_the_table(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    options = ("rows.jsonl", "-o", "out.csv", "--limit", "1", "--with-body", "--progress", "none")
    assert run("run", *options).exit_code == 0
    table = (tmp_path / "out.csv").read_text()
    assert table.startswith("custom_id,text,finish_reason,prompt_tokens,completion_tokens,error,re")
    assert "limit" not in read_settings(tmp_path / "out.csv")
    fail_in(tmp_path / "out.csv", "r0")
    assert run("retry", "out.csv", "--progress", "none").exit_code == 0
    again = (tmp_path / "out.csv").read_text()
    header = table.partition("\n")[0]
    assert again.startswith(f"{header}\nr0,")
    assert "out of memory" not in again


@pytest.mark.usefixtures("worker")
def test_rows_with_empty_fields_run_as_asked_and_a_later_command_must_ask_alike(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    (tmp_path / "rows.csv").write_text("id;call\na;hello\nb;\n")
    command = ("run", "rows.csv", "-o", "out.jsonl", "--progress", "none", "--template", "{call}!")
    skipped = run(*command, "--empty", "skip")
    assert (skipped.exit_code, skipped.stderr, ids(out)) == (
        0,
        "1 row with empty fields left out\n",
        ["a"],
    )
    refused = run(*command, "--empty", "fail")
    assert refused.exit_code == 2
    assert "has results of other options (empty was 'skip')" in refused.stderr
    failed = run(*command, "--empty", "fail", "--replace")
    assert (failed.exit_code, ids(out)) == (1, ["a"])
    [error] = errors(out)
    assert error["custom_id"] == "b"
    assert "call: empty; the template needs it" in error["error"]["message"]
    again = run("retry", "out.jsonl", "--progress", "none")
    assert (again.exit_code, errors(out)) == (1, [error])
    assert run(*command, "--empty", "run", "--replace").exit_code == 0
    assert ids(out) == ["a", "b"]


@pytest.mark.usefixtures("worker")
def test_rows_of_stdin_with_empty_fields_fail_behind_those_that_were_looked_at(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.shape.FIRST_ROWS", 1)
    command = ("-o", "out.jsonl", "--format", "csv", "--template", "{call}!", "--progress", "none")
    rows = "id,call\na,hello\nb,\n"
    assert run("run", "-", *command, input=rows).exit_code == 1
    assert [line["custom_id"] for line in errors(tmp_path / "out.jsonl")] == ["b"]
    (tmp_path / "rows.csv").write_text(rows)
    assert run("retry", "out.jsonl", "--input", "rows.csv", "--progress", "none").exit_code == 1


@pytest.mark.usefixtures("worker")
def test_how_to_continue_is_told_after_the_reason(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device", "out.jsonl")

    write_rows(tmp_path / "rows.jsonl", 1)
    monkeypatch.setattr(Output, "commit", fill)
    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    assert done.exit_code == 1
    reason, advice = done.stderr.splitlines()
    assert reason == "omlx-submit: out.jsonl: No space left on device"
    assert advice.startswith("stopped; continue with: omlx-submit")


def test_a_run_that_has_not_begun_is_not_continued(
    run: Run, redis_url: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    database = f"{redis_url.rpartition('/')[0]}/9999"
    for output, url, code, said in (
        ("out.jsonl", nowhere, 3, f"Redis at {nowhere} does not answer"),
        ("out.jsonl", database, 3, "has no database of this number; end the URL in a smaller one"),
        (f"{'x' * 300}.jsonl", redis_url, 1, "File name too long"),
    ):
        done = run("run", "rows.jsonl", "-o", output, "--redis-url", url)
        assert done.exit_code == code
        [reason] = done.stderr.splitlines()
        assert said in reason


@pytest.mark.usefixtures("worker")
def test_a_schema_gives_the_table_columns_also_in_a_retry(run: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"name": {}}}')
    write_rows(tmp_path / "rows.jsonl", 2)
    options = ("rows.jsonl", "-o", "out.csv", "--schema", "schema.json", "--progress", "none")
    assert run("run", *options).exit_code == 0
    table = (tmp_path / "out.csv").read_text()
    assert table.splitlines()[0].endswith(",error,name")
    assert len(table.splitlines()) == 3
    (tmp_path / "schema.json").unlink()
    assert run("retry", "out.csv", "--progress", "none").exit_code == 0
    assert (tmp_path / "out.csv").read_text() == table


@pytest.mark.usefixtures("worker")
def test_probabilities_give_the_table_a_column_for_each_choice(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mails.csv").write_text("id,mail\nm1,hello\nm2,bye\n")
    choices = ("--choice", "a", "--choice", "b")
    options = ("mails.csv", "--raw", "--template", "{mail}", *choices, "--probabilities")
    assert run("run", *options, "-o", "out.csv", "--keep", "--progress", "none").exit_code == 0
    table = (tmp_path / "out.csv").read_text().splitlines()
    assert table[0] == (
        "id,mail,custom_id,text,finish_reason,prompt_tokens,completion_tokens,error,a,b"
    )
    # A letter's log-probability is minus its number.
    assert [line[:32] for line in table[1:]] == [
        "m1,hello,m1,a,stop,5,0,,0.731058",
        "m2,bye,m2,a,stop,3,0,,0.73105857",
    ]
    batch = run("run", *options, "--detach").stdout.strip()
    assert run("results", batch, "--wait", "-o", "left.csv", *choices).exit_code == 0
    left = (tmp_path / "left.csv").read_text().splitlines()
    assert left == [line.split(",", 2)[2] for line in table]


@pytest.mark.usefixtures("worker")
def test_so_do_those_that_rows_of_requests_ask_for(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    options = ("--choice", "a", "--choice", "b", "--probabilities", "--progress", "none")
    assert run("run", "rows.jsonl", "-o", "out.csv", *options).exit_code == 0
    assert (tmp_path / "out.csv").read_text().splitlines()[0].endswith(",error,a,b")


@pytest.mark.usefixtures("worker")
def test_an_output_that_is_a_link_stays_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "folder" / "real.jsonl")
    write_rows(tmp_path / "rows.jsonl", 3)
    options = ("run", "rows.jsonl", "-o", "out.jsonl", "--ordered", "--progress", "none")
    for _ in range(2):
        assert run(*options).exit_code == 0
    assert (tmp_path / "out.jsonl").is_symlink()
    assert ids(tmp_path / "folder" / "real.jsonl") == ["r0", "r1", "r2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "out.jsonl", "rows.jsonl"]
    assert run("retry", "out.jsonl", "--progress", "none").exit_code == 0


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_outputs_that_only_their_owner_may_read_stay_so(
    run: Run, tmp_path: Path, name: str
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line(name) for name in "ab"] + ["nonsense"])
    options = ("run", "rows.jsonl", "-o", name, "--progress", "none")
    run(*options, "--limit", "1")
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    for more in ((), ("--ordered",)):
        assert run(*options, *more).exit_code == 1
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_an_output_that_is_a_link_to_itself_is_told(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    (tmp_path / "out.jsonl").symlink_to("out.jsonl")
    commands = (["run", "rows.jsonl", "-o"], ["retry"], ["results", "batch-0123456789ab", "-o"])
    for command in commands:
        done = run(*command, "out.jsonl")
        assert isinstance(done.exception, SystemExit)
        assert done.exit_code == 2
        assert done.stderr == (
            "omlx-submit: out.jsonl: is a link that leads to itself; give another output\n"
        )


@pytest.mark.usefixtures("worker")
def test_failures_that_would_only_repeat_are_not_advised_to_be_repeated(
    run: Run, tmp_path: Path
) -> None:
    # The second is refused by the worker, which alone counts tokens.
    too_long = batch_line("b", "x" * 9_990, max_tokens=50)
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", temperature=9), too_long])
    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    assert done.exit_code == 1
    assert {line["error"]["code"] for line in errors(tmp_path / "out.jsonl")} == {"invalid_request"}
    assert "2 rows failed; another try would fail too; correct the input" in done.stderr
    assert "retry" not in done.stderr


def test_a_row_whose_model_was_not_announced_runs_again_once_it_is(
    run: Run, redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    connection.delete(MODELS_KEY)
    announce(connection, "other")
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), batch_line("b", temperature=9)])
    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    codes = [line["error"]["code"] for line in errors(tmp_path / "out.jsonl")]
    assert (done.exit_code, codes) == (1, ["model_not_found", "invalid_request"])
    said = (
        "2 rows failed; no worker has announced the model for 1 of them; start one, then try "
        "again with: omlx-submit retry out.jsonl\n"
    )
    assert said in done.stderr
    assert said in run("retry", "out.jsonl", "--progress", "none").stderr
    with running_worker(redis_url):
        wait_for_model(connection)
        run("retry", "out.jsonl", "--progress", "none")
    assert ids(tmp_path / "out.jsonl") == ["a"]


@pytest.mark.usefixtures("worker")
def test_a_resumed_run_says_how_many_rows_had_failed_before(run: Run, tmp_path: Path) -> None:
    rows = [batch_line("a", temperature=9), batch_line("b", temperature=9), batch_line("c")]
    options = ("run", "rows.jsonl", "-o", "out.jsonl")
    write_jsonl(tmp_path / "rows.jsonl", rows)
    assert "done before" not in run(*options).stderr
    # The corrected row runs again, so it is no row from before.
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), *rows[1:]])
    resumed = run(*options).stderr
    assert ": 1 ok, 0 failed; done before: 2, 1 of them failed\n" in resumed
    assert '"done_before": 2, "failed_before": 1,' in resumed
    assert '"failed_before": 0,' in run("retry", "out.jsonl").stderr


@pytest.mark.usefixtures("worker")
def test_a_duplicate_that_could_not_run_is_told_as_a_duplicate_alone(
    run: Run, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), batch_line("a") | {"method": "GET"}])
    assert run("run", "rows.jsonl", "-o", "out.jsonl").exit_code == 1
    (line,) = errors(tmp_path / "out.jsonl")
    assert line["error"]["code"] == "duplicate_custom_id"
    assert "param" not in line["error"]


@pytest.mark.usefixtures("worker")
def test_fields_without_effect_are_named_at_the_end(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", user="me", store=True)])
    done = run("run", "rows.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 0
    assert "rows with ignored fields: user 1, store 1" in done.stderr.splitlines()
    detached = run("run", "rows.jsonl", "--detach")
    assert "rows with ignored fields: user 1, store 1" in detached.stderr.splitlines()


def test_two_runs_of_a_model_show_their_own_rows_and_their_share_of_the_tokens(
    connection: redis.Redis,
) -> None:
    sign_on(connection, "mac-1", ALIAS)
    sign_on(connection, "mac-2", ALIAS)
    for run, rows in (("aa", 6), ("bb", 2)):
        for row in range(rows):
            job = row_job_id(run, f"{row:x}")
            connection.zadd(f"rq:wip:{queue_name(ALIAS, 'bulk')}", {f"{job}:execution": 1e12})
    connection.zadd(f"rq:wip:{queue_name(ALIAS, 'high')}", {"somebody-else:execution": 1e12})

    def shown(run: str) -> Speed | None:
        meter = Meter()
        WorkerWatch(connection, run).look({ALIAS, "another"}, meter, in_flight=100)
        return meter.now

    both = 2 * 123.4
    assert shown("aa") == Speed(running=6, tokens_in=0, tokens_out=pytest.approx(both * 6 / 9))
    assert shown("bb") == Speed(running=2, tokens_in=0, tokens_out=pytest.approx(both * 2 / 9))
    assert shown("cc") == Speed(running=0, tokens_in=0, tokens_out=0)
    connection.delete(workers_key(ALIAS))
    assert shown("aa") == Speed(running=0, tokens_in=0, tokens_out=0)


def test_of_a_server_that_is_away_no_speed_is_shown(connection: redis.Redis) -> None:
    sign_on(connection, "mac-1", ALIAS)
    meter = Meter(now=Speed(running=6, tokens_in=0, tokens_out=12.5))
    with redis.Redis(port=free_port(), retry=None) as away:
        WorkerWatch(away, "aa").look({ALIAS}, meter, in_flight=100)
    assert meter.now is None


def test_what_holds_rows_up_is_told_once_while_they_wait(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIGURES_SECONDS", 0.0)
    watch, said = (
        WorkerWatch(connection, "aa"),
        f"no worker serves {ALIAS}; rows wait, and Ctrl-C loses none\n",
    )

    def told(*, in_flight: int = 1) -> str:
        watch.look({ALIAS}, Meter(), in_flight=in_flight)
        return capsys.readouterr().err

    assert [told(), told(), told()] == ["", said, ""]
    sign_on(connection, "mac-1", ALIAS)
    assert told() == ""
    connection.sadd("omlx:paused", ALIAS)
    paused = (
        f"{ALIAS} is paused; omlx-submit resume {ALIAS} lets it go on; rows wait, and Ctrl-C loses "
        "none\n"
    )
    assert [told(), told(), told()] == ["", paused, ""]
    connection.delete(workers_key(ALIAS))
    assert [told(in_flight=0), told(in_flight=0), told(), told()] == ["", "", "", said]


def test_workers_that_load_are_told_once_and_the_bar_shows_their_progress(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "FIGURES_SECONDS", 0.0)
    watch, meter, said = WorkerWatch(connection, "aa"), Meter(total=3), []
    for part in range(1, 6):
        for worker, done in (("mac-1", part - 1), ("mac-2", part)):
            told = f"warming up {done} of 57"
            sign_on(connection, worker, ALIAS, state="loading", progress=told)
        watch.look({ALIAS}, meter, in_flight=1)
        said.append(capsys.readouterr().err)
        told = f"the workers of {ALIAS} are loading it (warming up {part} of 57)"
        assert progress.figures(meter)[0] == told
    loading = f"the workers of {ALIAS} are loading it (warming up 2 of 57)"
    assert said == ["", f"{loading}; rows wait, and Ctrl-C loses none\n", "", "", ""]


def test_a_retry_of_a_run_from_stdin_asks_for_its_input(run: Run) -> None:
    with Output.open(Path("out.jsonl")) as output:
        output.store.remember(RunOptions.of("-", {}).settings)

    retried = run("retry", "out.jsonl", input=json.dumps(batch_line("a")))

    assert (retried.exit_code, retried.stderr) == (
        2,
        "omlx-submit: out.jsonl: its input came on stdin; save that in a file, and give --input "
        "FILE\n",
    )


def test_a_retry_of_rows_that_have_not_run_is_refused(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    options = RunOptions.of("rows.jsonl", {})
    with Output.open(Path("out.csv")) as output:
        output.store.remember(options.settings)

    retried = run("retry", "out.csv", "--progress", "none")

    assert retried.exit_code == 2
    assert "out.csv: 3 rows have not run; give the run's command again\n" in retried.stderr
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.usefixtures("worker")
def test_a_retry_takes_only_an_input_that_has_rows_that_failed(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", temperature=9), batch_line("b")])
    write_rows(tmp_path / "other.jsonl", 2)
    assert run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none").exit_code == 1
    before = read_settings(tmp_path / "out.jsonl")

    wrong = run("retry", "out.jsonl", "--input", "other.jsonl", "--progress", "none")

    assert wrong.exit_code == 2
    assert "other.jsonl: holds none of the rows that failed in" in wrong.stderr
    assert read_settings(tmp_path / "out.jsonl") == before
    (tmp_path / "rows.jsonl").rename(tmp_path / "moved.jsonl")
    moved = run("retry", "out.jsonl", "--input", "moved.jsonl", "--progress", "none")
    assert moved.exit_code == 1
    assert "keeps its rows" not in moved.stderr
    assert read_settings(tmp_path / "out.jsonl")["input"] == str(tmp_path / "moved.jsonl")
    assert ids(tmp_path / "out.jsonl") == ["b"]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv"])
def test_results_of_other_options_are_replaced_only_if_told_and_kept_as_a_copy(
    run: Run, tmp_path: Path, name: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", 2)
    command = ("run", "rows.jsonl", "-o", name, "--progress", "none")
    assert run(*command, "--stop", "a" * 99).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    refused = run(*command, "--seed", "7")
    assert refused.exit_code == 2
    said = f"{name}: has results of other options (seed was None, stop); give those again"
    assert said in refused.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    told = run(*command, "--seed", "7", "--replace")
    results = {"out.jsonl": "out.jsonl", "out.csv": "out.csv.jsonl"}[name]
    assert f"the results so far are kept in {results}.1" in told.stderr
    assert (tmp_path / f"{results}.1").read_bytes() == before[results]
    assert (tmp_path / f"{name}.1").read_bytes() == before[name]
    assert (tmp_path / results).read_bytes() != before[results]
    assert sorted(ids(tmp_path / results)) == ["r0", "r1"]
    # The run has these options now: going on needs no flag, and copies nothing.
    for more in ((), ("--replace",)):
        assert run(*command, "--seed", "7", *more).exit_code == 0
    assert run(*command, "--replace").exit_code == 0
    assert (tmp_path / f"{results}.2").exists()
    assert not (tmp_path / f"{results}.3").exists()


@pytest.mark.usefixtures("worker")
def test_options_may_change_without_a_flag_while_nothing_is_done(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"id": "a", "text": "hi"}])
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    too_long = "x" * 9_990 + "{text}"
    assert run(*command, "--template", too_long, "--max-tokens", "50").exit_code == 1
    assert run(*command, "--template", "{text}").exit_code == 0


@pytest.mark.usefixtures("worker")
def test_a_row_that_is_done_is_never_replaced_by_one_that_failed(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), batch_line("b")])
    command = ("run", "rows.jsonl", "-o", "out.csv", "--progress", "none", "--ordered")
    assert run(*command).exit_code == 0
    before = (tmp_path / "out.csv.jsonl").read_bytes()
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", temperature=9), batch_line("b")])
    assert run(*command).exit_code == 1
    assert (tmp_path / "out.csv.jsonl").read_bytes() == before
    assert [line["custom_id"] for line in errors(tmp_path / "out.csv")] == ["a"]
    # The table says in the row itself that its text is of an earlier request.
    with (tmp_path / "out.csv").open(newline="") as stream:
        first, second = csv.DictReader(stream)
    assert (first["custom_id"], second["error"]) == ("a", "")
    assert first["text"]
    assert first["error"].startswith("invalid_request: line 1, id 'a': temperature")


@pytest.mark.usefixtures("worker")
def test_a_run_keeps_its_model_when_a_second_one_becomes_known(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{"id": name, "text": name} for name in "ab"])
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--template", "{text}")
    wait_for_model(connection)
    assert run(*command, "--limit", "1").exit_code == 0
    announce(connection, "second", at=time.time())
    before = (tmp_path / "out.jsonl").read_bytes()
    done = run(*command)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert ids(tmp_path / "out.jsonl") == ["a", "b"]


@pytest.mark.usefixtures("worker")
def test_a_retry_runs_what_it_is_said_to_run_and_ends(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    too_long = batch_line("long", "x" * 9_990, max_tokens=50)
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), too_long, batch_line("b")])
    run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    fail_in(tmp_path / "out.jsonl", "b")

    first = run("retry", "out.jsonl")
    assert json.loads(first.stderr.splitlines()[-2])["ok"] == 1
    assert sorted(ids(tmp_path / "out.jsonl")) == ["a", "b"]
    assert "1 row failed; another try would fail too; correct the input" in first.stderr
    again = run("retry", "out.jsonl")
    assert json.loads(again.stderr.splitlines()[-2])["rows"] == 0
    meant = run("retry", "out.jsonl", "--refused")
    assert json.loads(meant.stderr.splitlines()[-2])["failed"] == 1
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), batch_line("long"), batch_line("b")])
    assert run("retry", "out.jsonl").exit_code == 0
    assert errors(tmp_path / "out.jsonl") == []
    assert jobs_in_redis(connection) == 0


@pytest.mark.usefixtures("worker")
def test_a_failed_row_that_the_input_no_longer_has_is_not_advised_to_be_run(
    run: Run, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    assert run(*command).exit_code == 0
    fail_in(tmp_path / "out.jsonl", "r2")
    assert "1 row failed; try again with: omlx-submit retry" in run(*command, "--limit", "1").stderr
    write_rows(tmp_path / "rows.jsonl", 2)
    done = run(*command)
    said = "1 row of earlier runs is not in the input any more: kept\n"
    assert (done.exit_code, done.stderr) == (0, said)
    assert [line["custom_id"] for line in errors(tmp_path / "out.jsonl")] == ["r2"]


def fail_in(output: Path, custom_id: str) -> None:
    """Make a row of an output one that failed with an error that may pass."""
    (line,) = (line for line in lines(results_path(output)) if line["custom_id"] == custom_id)
    digest = line["id"].removeprefix(ID_PREFIX)
    row = BadRow(0, custom_id, "", "", digest, own_id=True)
    write_jsonl(
        results_path(output), [each for each in lines(results_path(output)) if each != line]
    )
    with errors_path(output).open("ab") as stream:
        stream.write(write_line(RowResult(row, "", code="failed", reason="out of memory")))


@pytest.mark.usefixtures("worker")
def test_the_last_lines_name_the_files(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [*(batch_line(name) for name in "abc"), "nonsense"])
    command = ("run", "rows.jsonl", "-o", "out.csv", "--ordered")
    first = run(*command, "--limit", "1").stderr
    assert "written: out.csv (1 row), out.csv.jsonl (1 row)\n" in first
    summary = json.loads(run(*command).stderr.splitlines()[-2])
    assert (summary["rows"], summary["done_before"]) == (3, 1)
    assert summary["files"] == {
        "out.csv": 4,
        "out.csv.jsonl": 3,
        "out.csv.errors.jsonl": 1,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"input": "rows.jsonl", "format": "jsonl", "colour": "red"},
        {"input": "rows.jsonl"},
        {"input": "rows.jsonl", "format": "xml"},
        {"input": "rows.jsonl", "format": "jsonl", "sampling": 5},
        ["rows.jsonl"],
        "rows.jsonl",
    ],
)
def test_a_run_file_of_another_version_is_told(run: Run, tmp_path: Path, settings: Any) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    with contextlib.closing(Store(tmp_path / "out.jsonl")) as store:
        store.remember(settings)
    for command in (("retry",), ("run", "rows.jsonl", "-o")):
        done = run(*command, "out.jsonl")
        assert isinstance(done.exception, SystemExit), done.exception
        (said,) = done.stderr.splitlines()
        assert done.exit_code == 2
        assert "out.jsonl.run: another version of omlx-submit wrote it (" in said
        assert "; use that version, or run with another output" in said


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_kept_columns_stand_beside_their_answers_also_beyond_a_limit_and_in_a_retry(
    run: Run, tmp_path: Path, suffix: str
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = "".join(f"{name}\t{n}\t{name} asks\n" for n, name in enumerate("cab"))
    (tmp_path / "rows.tsv.gz").write_bytes(gzip.compress(f"key\tn\ttext\n{rows}".encode()))
    out = tmp_path / f"out{suffix}"
    command = ("run", "rows.tsv.gz", "-o", out.name, "--template", "{text}", "--id-field", "key")
    command = (*command, "--keep", "--progress", "none")

    def table() -> list[dict[str, Any]]:
        if suffix == ".parquet":
            return list(parquet.read_table(out).to_pylist())
        with out.open(newline="") as stream:
            return list(csv.DictReader(stream))

    for arguments in (command, (*command, "--limit", "1"), ("retry", out.name)):
        assert run(*arguments).exit_code == 0
        kept = [(row["key"], row["n"], row["input.text"], row["custom_id"]) for row in table()]
        assert kept == [
            ("c", "0", "c asks", "c"),
            ("a", "1", "a asks", "a"),
            ("b", "2", "b asks", "b"),
        ]
        assert list(table()[0])[:4] == ["key", "n", "input.text", "custom_id"]


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("how", ["limit", "retry"])
def test_an_answer_stands_beside_no_row_that_was_edited_since(
    run: Run, tmp_path: Path, how: str
) -> None:
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    source.write_text("id,text\na,old a\nb,old b\n")
    options = ("rows.csv", "-o", "out.csv", "--template", "{text}", "--keep", "--progress", "none")
    assert run("run", *options).exit_code == 0
    source.write_text("id,text\na,old a\nb,new b\n")
    again = ("run", *options, "--limit", "1") if how == "limit" else ("retry", "out.csv")
    done = run(*again)
    assert done.exit_code == 0
    assert "rows that changed since their answers came: 1; their columns of" in done.stderr
    with out.open(newline="") as stream:
        table = list(csv.DictReader(stream))
    assert [(row["id"], row["input.text"], row["custom_id"]) for row in table] == [
        ("a", "old a", "a"),
        ("", "", "b"),
    ]
    assert "changed since" not in run("run", *options).stderr
    assert ",new b," in out.read_text()


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            ["-o", "out.jsonl", "--keep"],
            "--keep: adds the columns of a file to a table; "
            "give an output in .csv or .parquet in place of out.jsonl\n",
        ),
        (["--detach", "--keep"], "--keep needs a file as input, and an output"),
        (["-o", "out.csv", "--delimiter", ";;"], "--delimiter: got ';;'; give one character"),
        (["-o", "out.csv", "--delimiter", '"'], "--delimiter: got '\"'; give one character"),
    ],
)
def test_options_of_tables_that_cannot_be_are_told(
    run: Run, tmp_path: Path, args: list[str], reason: str
) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nhello\n")
    done = run("run", "rows.csv", *args)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert reason in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_a_delimiter_is_for_a_csv_alone(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    done = run("run", "rows.jsonl", "--dry-run", "--delimiter", "tab")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--delimiter: got 'tab', and the input is no CSV; leave it out" in done.stderr


@pytest.mark.usefixtures("worker")
def test_formulas_are_marked_in_a_csv_unless_told_otherwise(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id;prompt\n=1;hello\n")
    command = ("run", "rows.csv", "-o", "out.csv", "--delimiter", ";", "--progress", "none")
    for more, shown in (((), "'=1"), (("--no-csv-safe",), "=1"), ((), "'=1")):
        assert run(*command, *more).exit_code == 0
        assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith(f"{shown};")
    # A retry does as the last run did.
    assert run("retry", "out.csv").exit_code == 0
    assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith("'=1;")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("name", "content", "more", "begins"),
    [
        ("r.csv", b"\xef\xbb\xbfid;prompt\r\n1;a\r\n", [], b"\xef\xbb\xbfcustom_id;text;"),
        ("r.csv", b"sep=;\nid;prompt\n1;a\n", ["--keep"], b"id;prompt;custom_id;text;"),
        ("r.csv", b"id|prompt\n1|a\n", [], b"custom_id|text|"),
        ("r.csv", b"id:prompt\n1:a\n", ["--delimiter", ":"], b"custom_id:text:"),
        ("r.csv", b"prompt\na\n", [], b"custom_id,text,"),
        ("r.tsv", b"id\tprompt\n1\ta\n", [], b"custom_id,text,"),
        ("r.jsonl", b'{"prompt": "a;b"}\n', [], b"custom_id,text,"),
    ],
)
def test_a_csv_goes_out_as_it_came_in(
    run: Run, tmp_path: Path, name: str, content: bytes, more: list[str], begins: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    for command in (("run", name, "-o", "out.csv", *more), ("retry", "out.csv")):
        done = run(*command, "--progress", "none")
        assert done.exit_code == 0, done.output
        assert (tmp_path / "out.csv").read_bytes().startswith(begins)


def test_a_broken_zipped_input_is_told_before_anything_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.txt.gz").write_bytes(gzip.compress(b"hello\n" * 1000)[:-9])
    for more in (["--dry-run"], ["--detach"], ["-o", "out.jsonl"]):
        done = run("run", "rows.txt.gz", *more)
        assert isinstance(done.exception, SystemExit)
        assert done.exit_code == 2
        assert done.stderr.splitlines()[-1].startswith(
            "omlx-submit: the input is no whole gzip file ("
        )


@pytest.mark.parametrize("doors", [["-o", "out.jsonl"], ["--dry-run"], ["--detach"]])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "--regex",
            "([0-9]+",
            "--regex: the regular expression cannot be compiled (uncl",
        ),
        (
            "--schema",
            {"uniqueItems": True},
            "--schema: the schema cannot be compiled (",
        ),
        ("--schema", {"type": "objekt"}, "--schema: type: got 'objekt'; give one of "),
    ],
)
def test_options_that_no_row_can_have_are_told_once_before_any_row(
    run: Run,
    connection: redis.Redis,
    tmp_path: Path,
    doors: list[str],
    option: str,
    value: Any,
    said: str,
) -> None:
    write_rows(tmp_path / "rows.jsonl", 20)
    if isinstance(value, dict):
        (tmp_path / "schema.json").write_text(json.dumps(value))
        value = "schema.json"
    done = run("run", "rows.jsonl", option, value, *doors)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith(f"omlx-submit: {said}")
    assert not (tmp_path / "out.jsonl").exists()
    assert jobs_in_redis(connection) == 0


WHAT, REMEDY = "the list of choices cannot be compiled (no text)", "change it"


def test_what_only_a_worker_refuses_ends_the_run_before_any_row_is_written(
    run: Run,
    redis_url: str,
    connection: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare = FakeEngine.prepare

    def refuse(self: FakeEngine, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        if request.structured_outputs is not None:
            raise InvalidRequest("structured_outputs.choice", WHAT, REMEDY)
        return prepare(self, request, job_id)

    monkeypatch.setattr(FakeEngine, "prepare", refuse)
    write_rows(tmp_path / "rows.jsonl", 300)
    command = ("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none")
    with running_worker(redis_url):
        done = run(*command, "--choice", "a")
        assert (done.exit_code, done.stderr) == (2, f"omlx-submit: --choice: {WHAT}; {REMEDY}\n")
        assert lines(tmp_path / "out.jsonl") == errors(tmp_path / "out.jsonl") == []
        assert run(*command).exit_code == 0
    assert len(lines(tmp_path / "out.jsonl")) == 300
    assert jobs_in_redis(connection) == 0


@pytest.mark.usefixtures("worker")
def test_a_refusal_of_rows_with_constraints_of_their_own_is_theirs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = FakeEngine.prepare

    def refuse(self: FakeEngine, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        if request.constraint and "own" in request.constraint.value:
            raise InvalidRequest("structured_outputs.choice", WHAT, REMEDY)
        return prepare(self, request, job_id)

    monkeypatch.setattr(FakeEngine, "prepare", refuse)
    own = {"structured_outputs": {"choice": ["own"]}}
    write_rows(tmp_path / "rows.jsonl", 5, **own)
    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "none", "--choice", "a")
    assert done.exit_code == 1
    assert len(errors(tmp_path / "out.jsonl")) == 5


@pytest.mark.usefixtures("worker")
def test_a_row_without_a_limit_ends_where_it_repeats_itself(run: Run, tmp_path: Path) -> None:
    limits = {"free": None, "limited": 1050}
    rows = [batch_line(name, GOES_ROUND, max_tokens=limit) for name, limit in limits.items()]
    rows.append(batch_line("off", GOES_ROUND, max_tokens=None, repetition_detection={}))
    choice = {"structured_outputs": {"choice": ["ab"]}}
    rows.append(batch_line("held", GOES_ROUND, max_tokens=None, **choice))
    tools = [{"type": "function", "function": {"name": "give"}}]
    chat = {"model": ALIAS, "messages": [{"role": "user", "content": GOES_ROUND}], "tools": tools}
    rows.append(batch_line("calls") | {"url": "/v1/chat/completions", "body": chat})
    chat = {
        "model": ALIAS,
        "messages": [{"role": "user", "content": [image(), part_of(GOES_ROUND)]}],
    }
    rows.append(batch_line("scan") | {"url": "/v1/chat/completions", "body": chat})
    rows.append(batch_line("other", max_tokens=None))
    write_jsonl(tmp_path / "rows.jsonl", rows)

    done = run("run", "rows.jsonl", "-o", "out.jsonl", "--progress", "ndjson")

    bodies = {row["custom_id"]: row["response"]["body"] for row in lines(tmp_path / "out.jsonl")}
    ends = {name: body["choices"][0]["finish_reason"] for name, body in bodies.items()}
    assert {**ends, "other": ""} == {
        "free": "repetition",
        "limited": "length",
        "off": "length",
        "held": "length",
        "calls": "length",
        "scan": "repetition",
        "other": "",
    }
    assert bodies["free"]["usage"]["completion_tokens"] == 1024
    summary = json.loads(done.stderr.splitlines()[-1])
    assert (summary["ok"], summary["cut_by_repetition"]) == (7, 2)


@pytest.mark.usefixtures("worker")
def test_an_option_ends_loops_in_rows_with_a_limit_and_another_lets_them_go_on(
    run: Run, tmp_path: Path
) -> None:
    limits = {"free": None, "limited": 1050}
    rows = [batch_line(name, GOES_ROUND, max_tokens=limit) for name, limit in limits.items()]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    for option, reason in (("--end-loops", "repetition"), ("--no-end-loops", "length")):
        run("run", "rows.jsonl", "-o", f"{option}.jsonl", option)
        results = [row["response"]["body"] for row in lines(tmp_path / f"{option}.jsonl")]
        assert [body["choices"][0]["finish_reason"] for body in results] == [reason] * 2
