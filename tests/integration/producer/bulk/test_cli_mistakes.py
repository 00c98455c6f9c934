"""Mistakes that users make with files: one sentence, an exit code, never a traceback."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click
import pytest
import redis

from omlx_producer.cli import batch as batch_commands
from omlx_producer.cli.bulk import run as run_command
from omlx_producer.commands.session import with_command
from omlx_producer.wire import MODELS_KEY
from tests.helpers.bulk_rows import batch_of
from tests.helpers.bulk_runs import jobs_in_redis, write_rows
from tests.helpers.fake_worker import announce
from tests.helpers.workers import ALIAS
from tests.integration.producer.bulk.conftest import Run


def told(run: Run, *args: str) -> tuple[int, str]:
    """The exit code and the one sentence."""
    done = run(*args)
    assert isinstance(done.exception, SystemExit), done.exception
    (sentence,) = done.stderr.splitlines()
    return done.exit_code, sentence


def test_a_csv_whose_header_is_none_is_told(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    source.write_text('"a"b,c\n1,2\n')
    code, said = told(run, "run", str(source), "--template", "{c}", "--dry-run")
    assert code == 2
    assert "the CSV input's first line, which must name the columns, is not CSV" in said


@pytest.mark.parametrize("how", [["--dry-run"], ["--detach"], ["-o", "{folder}/out.jsonl"]])
def test_a_parquet_that_is_none_is_told(run: Run, tmp_path: Path, how: list[str]) -> None:
    pytest.importorskip("pyarrow")
    source = tmp_path / "rows.parquet"
    source.write_text("nonsense")
    options = [option.format(folder=tmp_path) for option in how]
    done = run("run", str(source), "--template", "{c}", "--progress", "none", *options)
    assert done.exit_code == 2, done.exception
    assert "the Parquet input cannot be read" in done.stderr


@pytest.mark.parametrize("how", [["--dry-run"], ["--detach"], ["-o", "{folder}/out.jsonl"]])
@pytest.mark.parametrize(
    ("content", "models", "said"),
    [
        (
            "id,txt\n1,a\n",
            [],
            "--template: got '{{text}}', but the input lacks the column text; it has id, txt",
        ),
        (
            "text;id\na;1\n;2\n  ;3\n",
            [],
            "--empty: missing, and 2 rows have an empty {{text}}, first in line 3; give skip, fail "
            "or run",
        ),
        (
            "text\na\n",
            ["big"],
            f"--model: missing, but workers have announced several; give one of big, {ALIAS}",
        ),
        ("text\n\n", [], "{source}: holds no rows; give an input that has some"),
        (
            "text,n\na,1\n" + '"open,2\n' + "b,3\n" * 150,
            [],
            "line 3: not CSV (unexpected end of data); a quote that begins there takes lines 3 to "
            "153; close it, or write two for one that is text",
        ),
        (
            'text\na\n"open\nb\n"c"\nd\n',
            [],
            "line 3: not CSV (',' expected after '\"'); a quote that begins there takes lines 3 to "
            "5; close it, or write two for one that is text",
        ),
    ],
)
def test_what_would_fail_all_rows_is_told_before_anything_runs(
    run: Run,
    connection: redis.Redis,
    tmp_path: Path,
    how: list[str],
    content: str,
    models: list[str],
    said: str,
) -> None:
    source = tmp_path / "rows.csv"
    source.write_text(content)
    for model in models:
        announce(connection, model)
    options = [option.format(folder=tmp_path) for option in how]
    command = ("run", str(source), "--template", "{text}", *options)
    for more in [()] if "--empty" in said else [(), ("--empty", "fail")]:
        code, sentence = told(run, *command, *more)
        assert (code, sentence) == (2, "omlx-submit: " + said.format(source=source))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    assert not list(connection.scan_iter("omlx:batch:*"))


def test_lines_that_a_quote_takes_from_stdin_are_named(run: Run) -> None:
    content = "text\n" + "a\n" * 100 + '"open\nb\nc\n'
    done = run("run", "-", "--format", "csv", "--template", "{text}", "--detach", input=content)
    assert done.exit_code == 0
    rows = run("results", done.stdout.strip(), "--partial").stdout
    assert "a quote that begins there takes lines 102 to 104; close it" in rows


def test_an_output_that_is_no_file_is_told_before_anything_runs(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    batch, output = batch_of(connection, 1), tmp_path / "out.jsonl"
    os.mkfifo(output)
    for command in (["run", str(tmp_path / "rows.jsonl")], ["results", batch.id]):
        code, said = told(run, *command, "-o", str(output))
        assert code == 2
        assert said == f"omlx-submit: {output}: is not a regular file; give another output"
    assert jobs_in_redis(connection) == 0


@pytest.mark.parametrize("name", ["o.xlsx", "o", "-", "o.json"])
def test_an_output_that_names_no_known_format_is_told_before_anything_runs(
    run: Run, connection: redis.Redis, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    connection.delete(MODELS_KEY)
    write_rows(tmp_path / "rows.jsonl", 1)
    for command in (["run", "rows.jsonl"], ["results", batch_of(connection, 1).id]):
        done = run(*command, "-o", name)
        assert done.exit_code == 2
        said = f"got '{name}'; give a file whose name ends in .jsonl, .csv or .parquet"
        assert said in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_output_without_a_name_is_refused(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", 1))
    for command in (["retry"], ["run", rows, "-o"], ["results", batch_of(connection, 1).id, "-o"]):
        code, said = told(run, *command, "")
        assert (code, said.partition(": got '.'; give a file")[1]) == (2, ": got '.'; give a file")


def test_an_input_that_is_no_file_is_told(run: Run, tmp_path: Path) -> None:
    code, said = told(run, "run", str(tmp_path), "--format", "text", "--dry-run")
    assert (code, said) == (
        2,
        f"omlx-submit: {tmp_path}: is no regular file; give the path of a file",
    )


def test_files_with_names_of_options_are_told_by_their_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "system.jsonl").write_text("something else\n")
    write_rows(tmp_path / "rows.jsonl", 1)
    code, said = told(run, "run", "rows.jsonl", "-o", "system.jsonl")
    assert (code, said.split(";")[0]) == (
        2,
        "omlx-submit: system.jsonl: exists and is of no run of omlx-submit",
    )
    code, said = told(run, "run", "window.jsonl", "-o", "out.jsonl")
    assert (code, said.split(";")[0]) == (
        2,
        "omlx-submit: window.jsonl: there is no such file",
    )


def test_results_to_a_folder_that_is_none_are_refused_before_any_waiting(
    connection: redis.Redis, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_commands, "follow", lambda *_: pytest.fail("it waits"))
    batch = batch_of(connection, 1)
    output = tmp_path / "none" / "out.jsonl"
    code, said = told(run, "results", batch.id, "--wait", "-o", str(output))
    assert (code, said) == (
        2,
        f"omlx-submit: {output}: there is no folder {output.parent}; make it first",
    )


def test_retry_below_a_file_finds_no_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    code, said = told(run, "retry", str(tmp_path / "file" / "out.jsonl"))
    assert code == 2
    assert "out.jsonl.run: missing; give the output of an omlx-submit run" in said


def test_a_file_that_can_not_be_read_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out.jsonl.run"
    folder.mkdir()
    code, said = told(run, "retry", str(tmp_path / "out.jsonl"))
    assert (code, said) == (1, f"omlx-submit: {folder}: Is a directory")


@pytest.mark.parametrize(
    "given",
    [
        ["--redis-url", "redis://u:secret@host:1/2"],
        ["--redis-url=rediss://:secret@host/2"],
        ["--redis-url", "unix:///s?password=secret"],
    ],
)
def test_how_to_go_on_names_the_variable_in_place_of_a_password(
    monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["omlx-submit", "run", "a.csv", *given, "--ordered"])
    with click.Context(run_command) as context:
        context.params = {"redis_url": given[-1].removeprefix("--redis-url=")}
        variable = "OMLX_QUEUE_REDIS_URL set to the same URL"
        assert with_command() == f"with {variable}: omlx-submit run a.csv --ordered"
        assert with_command("watch", "j") == f"with {variable}: omlx-submit watch j"
        assert with_command(stdin=True).startswith(f"with the same input on stdin and {variable}:")


@pytest.mark.parametrize(
    "given",
    [
        ["--redis-url", "redis://host:1/2"],
        ["--redis-url=redis://host:1/2"],
        ["--template", "Summarise https://a.b/?id={id}"],
        ["--template", "http://[x {id}"],
        ["--system=see redis://u@host/?x"],
    ],
)
def test_how_to_go_on_is_the_command_itself(
    monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    url = ["--redis-url", "redis://host:1/2"] if "--redis-url" in given[0] else []
    monkeypatch.setattr("sys.argv", ["omlx-submit", "run", "a.csv", *given, "--ordered"])
    with click.Context(run_command) as context:
        context.params = {"redis_url": url[1] if url else None}
        typed = shlex.join(["run", "a.csv", *given, "--ordered"])
        assert with_command() == f"with: omlx-submit {typed}"
        assert with_command("watch", "j") == shlex.join(
            ["with:", "omlx-submit", "watch", "j", *url]
        )


@pytest.mark.parametrize("how", [["--dry-run"], ["--detach"], ["-o", "{folder}/out.jsonl"]])
def test_a_wrong_option_is_told_once_and_not_for_each_row(
    run: Run, tmp_path: Path, how: list[str]
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 3)
    options = [option.format(folder=tmp_path) for option in how]
    code, said = told(run, "run", str(source), "--temperature", "5", *options)
    assert (code, said) == (2, "omlx-submit: --temperature: got 5.0; give a number from 0 to 2")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_rows_that_name_their_models_are_not_told_to(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", 1)
    connection.delete(MODELS_KEY)
    _, said = told(run, "run", str(source), "--detach")
    assert said == (
        "omlx-submit: no worker has announced a model yet; start one with omlx-worker run "
        "-m MODEL, or pass --queue-anyway"
    )


def test_the_results_of_a_batch_replace_no_foreign_table(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    batch, table = batch_of(connection, 1), tmp_path / "mine.csv"
    batch.cancel()
    table.write_text("hello\n")
    code, said = told(run, "results", batch.id, "-o", str(table))
    assert code == 2
    assert "mine.csv" in said
    assert table.read_text() == "hello\n"
    table.unlink()
    for _ in range(2):
        run("results", batch.id, "-o", str(table))
        assert table.read_text().startswith("custom_id,")
