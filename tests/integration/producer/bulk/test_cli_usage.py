"""omlx-submit run and retry without a worker: dry runs, usage, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from omlx_producer.wire import MODELS_KEY
from tests.helpers.bulk_runs import batch_line, jobs_in_redis, write_jsonl, write_rows
from tests.helpers.fake_worker import announce
from tests.helpers.image_parts import image, part_of
from tests.helpers.redis_server import free_port
from tests.helpers.workers import ALIAS
from tests.integration.producer.bulk.conftest import Run


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_finds_everything_and_enqueues_nothing(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a", "x" * 8), batch_line("a"), "text"])
    done = run("run", "rows.jsonl", "--dry-run")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {
        "rows": 3,
        "bad": {"duplicate_custom_id": 1, "unparsable": 1},
        "prompt_tokens": 2,
        "prompt_tokens_exact": False,
        "pictures": 0,
        "picture_tokens": 1,
        "most_completion_tokens": 5,
        "ignored_fields": {},
    }
    assert "line 2: the id 'a' was given at line 1 already" in done.stderr
    assert jobs_in_redis(connection) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_dry_run_tells_pictures_and_their_tokens(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    def line(name: str, *content: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": [*content]}]}
        return batch_line(name) | {"url": "/v1/chat/completions", "body": body}

    linked = {"type": "image_url", "image_url": {"url": "scans/a.png"}}
    rows = [line("a", part_of("x" * 8), image(detail="low"), image()), line("b", linked)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    announce(connection, ALIAS, picture_tokens=64)
    done = run("run", "rows.jsonl", "--dry-run")
    found = json.loads(done.stdout)
    assert (found["pictures"], found["picture_tokens"]) == (2, 64)
    assert (found["prompt_tokens"], found["prompt_tokens_exact"]) == (2 + 2 * 64, False)
    assert found["ignored_fields"] == {"image_url.detail": 1}
    assert done.stderr.startswith(
        "line 2, id 'b': messages[0].content[0].image_url.url: got 'scans/a.png', and workers"
    )


def test_lines_that_are_no_requests_are_told_what_they_lack(run: Run, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [batch_line("a"), {"id": "m"}, [1], {"prompt": 5}])
    done = run("run", "rows.jsonl", "--dry-run")
    assert done.exit_code == 1
    assert "line 2, id 'm': prompt: missing; give a prompt, or messages\n" in done.stderr
    assert 'line 3: not a JSON object; write one, as in {"prompt": "Hi"}\n' in done.stderr
    assert "line 4: prompt: " in done.stderr


def test_a_dry_run_counts_rows_without_a_limit_as_workers_do(run: Run, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("hello\n")
    for options, most in (((), 4096), (("--raw",), 256), (("--max-tokens", "7"), 7)):
        done = run("run", "texts.txt", "--format", "text", "--dry-run", *options)
        assert json.loads(done.stdout)["most_completion_tokens"] == most


def test_an_output_that_has_rows_of_another_input_is_pointed_out(run: Run, tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_jsonl(tmp_path / f"{name}.jsonl", [batch_line("a", n=0)])
    alone = run("run", "one.jsonl", "-o", "out.jsonl")
    assert "keeps its rows" not in alone.stderr + run("run", "one.jsonl", "-o", "out.jsonl").stderr
    mixed = run("run", "other.jsonl", "-o", "out.jsonl")
    assert f"out.jsonl keeps its rows of {tmp_path / 'one.jsonl'}; for other.jsonl" in mixed.stderr


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["run", "rows.jsonl"], "--output: missing"),
        (["run", "rows.jsonl", "-o", "o.jsonl", "--detach"], "does not go with --detach"),
        (["run", "none.jsonl", "-o", "out.jsonl"], "none.jsonl: there is no such file"),
        (["run", "rows.dat", "-o", "out.jsonl"], "--format: missing, and rows.dat has no suffix"),
        (["run", "rows.jsonl", "-o", "rows.jsonl"], "would write over the input"),
        (["run", "rows.jsonl", "-o", "no/out.jsonl"], "there is no folder no"),
        (
            ["run", "rows.jsonl", "-o", "o.jsonl", "--template", "{", "--queue-anyway"],
            "--template: got '{'",
        ),
        (["run", "rows.jsonl", "-o", "o.jsonl", "--raw", "--system", "x"], "--system does not"),
        (["run", "-", "--format", "parquet", "-o", "o.jsonl"], "cannot be read from stdin"),
        (["retry", "out.jsonl"], "out.jsonl.run: missing"),
    ],
)
def test_usage_ends_with_2_and_one_sentence(
    run: Run, tmp_path: Path, args: list[str], reason: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    (tmp_path / "rows.dat").write_text("x")
    done = run(*args)
    assert isinstance(done.exception, SystemExit)
    assert done.exit_code == 2
    assert reason in done.stderr


def test_a_model_that_no_worker_has_announced_is_refused(
    run: Run, connection: redis.Redis, tmp_path: Path
) -> None:
    connection.delete(MODELS_KEY)
    write_rows(tmp_path / "rows.jsonl", 1)
    done = run("run", "rows.jsonl", "-o", "o.jsonl")
    assert done.exit_code == 2
    assert "no worker has announced a model yet" in done.stderr


@pytest.mark.parametrize("options", [(), ("--model", "asleep")])
def test_a_dry_run_needs_no_worker(
    run: Run, connection: redis.Redis, tmp_path: Path, options: tuple[str, ...]
) -> None:
    connection.delete(MODELS_KEY)
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "hello"}] * 3)
    lacks = "no worker serves asleep" if options else "no worker has announced a model yet"
    for rows, code in (("0", 0), ("2", 1)):
        done = run("run", "rows.jsonl", "--dry-run", rows, *options)
        assert (done.exit_code, json.loads(done.stdout)["rows"]) == (code, 3)
        assert done.stderr == f"{lacks}; an estimate needs one, so start omlx-worker run -m MODEL\n"
    assert jobs_in_redis(connection) == 0


def test_without_redis_it_ends_with_3(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    write_rows(tmp_path / "rows.jsonl", 1)
    done = run("run", "rows.jsonl", "-o", "out.jsonl")
    assert done.exit_code == 3
    assert "does not answer" in done.stderr
