"""omlx-submit embed: texts in, vectors out, resumed as any run."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
import redis
from click.testing import CliRunner

from omlx_producer import Producer
from omlx_producer.cli.main import cli
from omlx_producer.wire.embedding import read_vector
from tests.helpers.bulk_runs import errors, lines, wait_for_model, write_jsonl
from tests.helpers.fake_engine import CONTEXT, vector_of
from tests.helpers.workers import ALIAS, running_worker, wait_for
from tests.integration.producer.bulk.conftest import Run

SIZE = 4


def vectors(*lengths: int) -> list[list[float]]:
    return [array("f", vector_of(length, SIZE)).tolist() for length in lengths]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("".join("x" * length + "\n" for length in range(1, 101)))


@pytest.fixture
def run(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """omlx-submit, where a worker says itself what its model does."""
    monkeypatch.setenv("OMLX_QUEUE_REDIS_URL", redis_url)
    return lambda *args: CliRunner().invoke(cli, args, prog_name="omlx-submit")


@pytest.fixture
def embedder(redis_url: str, connection: redis.Redis) -> Iterator[None]:
    """A worker that makes vectors."""
    with running_worker(redis_url, vector_size=SIZE):
        wait_for_model(connection)
        yield


@pytest.mark.usefixtures("embedder")
def test_lines_become_an_array_of_numpy_in_their_order_and_a_later_run_goes_on(run: Run) -> None:
    embed = ("embed", "texts.txt", "-o", "vectors.npy")

    tried = run("embed", "texts.txt", "--dry-run", "5")
    assert tried.exit_code == 0, tried.stderr
    done = run(*embed, "--limit", "10")
    assert done.exit_code == 0, done.stderr
    assert np.load("vectors.npy").shape == (10, SIZE)
    first = Path("vectors.npy.jsonl").read_bytes()
    assert run(*embed).exit_code == 0
    made = np.load("vectors.npy")
    assert made.dtype == np.float32
    assert made.tolist() == vectors(*range(1, 101))
    whole = Path("vectors.npy.jsonl").read_bytes()
    assert whole.startswith(first)
    assert run(*embed).exit_code == 0
    assert Path("vectors.npy.jsonl").read_bytes() == whole


@pytest.mark.usefixtures("embedder")
def test_a_table_has_vectors_beside_the_columns_of_its_input(run: Run) -> None:
    Path("books.csv").write_text("id,title\na,Emma\nb,\nc,Dune\n")
    asked = ("--template", "T: {title}", "--empty", "fail", "--dimensions", "2", "--keep")

    done = run("embed", "books.csv", "-o", "books.parquet", *asked)

    assert done.exit_code == 1
    table = parquet.read_table("books.parquet")
    assert str(table.schema.field("embedding").type) == "list<element: float>"
    cut = vectors(7)[0][:2]
    assert table.select(["id", "title", "embedding", "prompt_tokens"]).to_pylist() == [
        {"id": "a", "title": "Emma", "embedding": cut, "prompt_tokens": 7},
        {"id": "b", "title": "", "embedding": None, "prompt_tokens": None},
        {"id": "c", "title": "Dune", "embedding": cut, "prompt_tokens": 7},
    ]
    assert [bool(error) for error in table["error"].to_pylist()] == [False, True, False]
    assert table.column_names == ["id", "title", "custom_id", *table.column_names[3:]]
    assert "text" not in table.column_names


@pytest.mark.usefixtures("embedder")
def test_a_text_that_fails_has_no_numbers_and_is_told(run: Run) -> None:
    write_jsonl(Path("rows.jsonl"), [{"prompt": "x" * length} for length in (CONTEXT + 1, 2)])

    assert run("embed", "rows.jsonl", "-o", "vectors.npy").exit_code == 1
    made = np.load("vectors.npy")
    assert np.isnan(made[0]).all()
    assert made[1].tolist() == vectors(2)[0]
    [error] = errors(Path("vectors.npy"))
    assert error["error"]["message"].startswith("line 1: prompt: got 10001 characters")
    # Of other texts there is not even the number of columns.
    write_jsonl(Path("rows.jsonl"), [{"prompt": "x" * (CONTEXT + 1)}])
    assert run("embed", "rows.jsonl", "-o", "none.npy").exit_code == 1
    assert np.load("none.npy").shape == (1, 0)


@pytest.mark.usefixtures("embedder")
@pytest.mark.parametrize(
    ("second", "got"),
    [({"input": "xx", "dimensions": 2}, "2 numbers, not 4"), ({"input": ["x", "y"]}, "2 vectors")],
)
def test_rows_that_no_array_can_hold_are_named_and_stay_beside_it(
    run: Run, second: dict[str, object], got: str
) -> None:
    bodies = {"a": {"input": "x"}, "b": second}
    rows = [
        {"custom_id": name, "url": "/v1/embeddings", "body": {"model": ALIAS, **body}}
        for name, body in bodies.items()
    ]
    write_jsonl(Path("rows.jsonl"), rows)

    done = run("embed", "rows.jsonl", "-o", "vectors.npy")
    assert done.exit_code == 2
    told = f"output: row 'b' has {got}; an array has one line of one length for each row; "
    assert f"{told}give an output in .parquet" in done.stderr
    assert not Path("vectors.npy").exists()
    assert {line["custom_id"] for line in lines(Path("vectors.npy.jsonl"))} == {"a", "b"}


@pytest.mark.usefixtures("embedder")
def test_python_embeds_a_file_or_texts(redis_url: str) -> None:
    with Producer(redis_url) as producer:
        assert not producer.run("texts.txt", "vectors.jsonl", embed=True, ordered=True)
        results = list(producer.run(["x", "xx"], embed=True, ordered=True))
    bodies = [line["response"]["body"] for line in lines(Path("vectors.jsonl"))]
    written = [read_vector(body["data"][0]["embedding"]).tolist() for body in bodies]
    assert written == vectors(*range(1, 101))
    told = [result.completion.vectors for result in results if result.completion]
    assert [[each.tolist() for each in one] for one in told] == [vectors(1), vectors(2)]


@pytest.mark.usefixtures("embedder")
def test_a_run_of_lines_for_embeddings_has_base64_in_its_table(run: Run) -> None:
    body = {"model": ALIAS, "input": ["x", "xx"]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    write_jsonl(Path("rows.jsonl"), [line])

    assert run("run", "rows.jsonl", "-o", "out.parquet").exit_code == 0
    table = parquet.read_table("out.parquet")
    told = [read_vector(text).tolist() for text in table["text"].to_pylist()]
    assert told == vectors(1, 2)
    assert table["prompt_tokens"].to_pylist() == [3, None]


def test_what_cannot_be_embedded_is_refused_in_a_sentence(
    run: Run, redis_url: str, connection: redis.Redis
) -> None:
    def refusal(*words: str) -> str:
        done = run(*words)
        assert done.exit_code == 2
        return done.stderr

    endings = "give a file whose name ends in"
    with running_worker(redis_url):
        wait_for_model(connection)
        assert f"{endings} .jsonl, .parquet or .npy" in refusal("embed", "texts.txt", "-o", "x.csv")
        assert f"{endings} .jsonl, .csv or .parquet" in refusal("run", "texts.txt", "-o", "x.npy")
        assert "--keep: adds the columns of a file to a table" in refusal(
            "embed", "texts.txt", "-o", "x.npy", "--keep"
        )
        assert refusal("embed", "texts.txt", "-o", "x.npy") == (
            "omlx-submit: INPUT: fake generates text and makes no vectors; "
            "name a model of embeddings\n"
        )


@pytest.mark.usefixtures("embedder")
def test_a_run_of_texts_on_a_model_of_embeddings_is_refused_at_once(run: Run) -> None:
    done = run("run", "texts.txt", "-o", "x.jsonl")

    assert (done.exit_code, done.stderr) == (
        2,
        "omlx-submit: messages: fake makes vectors and generates no text; "
        "name another model, or give input to /v1/embeddings\n",
    )


@pytest.mark.usefixtures("embedder")
@pytest.mark.parametrize("command", ["result", "watch"])
def test_a_job_for_vectors_has_no_text_to_print(run: Run, redis_url: str, command: str) -> None:
    with Producer(redis_url) as producer:
        job = producer.submit(input="xx")
        job.result(timeout=20)

    shown = run(command, job.id)
    assert (shown.exit_code, shown.stdout) == (2, "")
    sentence = f"{job.id}: made vectors and no text; give --json to omlx-submit result {job.id}"
    assert shown.stderr == f"omlx-submit: {sentence}\n"
    assert json.loads(run("result", job.id, "--json").stdout)["object"] == "list"


@pytest.mark.usefixtures("embedder")
def test_beside_a_model_of_text_no_model_needs_a_name(
    run: Run, redis_url: str, connection: redis.Redis
) -> None:
    asked = {"embeddings": {"input": "x"}, "completions": {"prompt": "x"}}
    rows = [{"custom_id": url, "url": f"/v1/{url}", "body": body} for url, body in asked.items()]
    write_jsonl(Path("rows.jsonl"), rows)
    with running_worker(redis_url, model_alias="text"):
        wait_for(lambda: connection.hexists("omlx:models", "text"))
        done = [
            run("embed", "texts.txt", "-o", "vectors.npy"),
            run("run", "texts.txt", "-o", "texts.csv"),
            run("run", "rows.jsonl", "-o", "out.jsonl"),
        ]
    assert [each.exit_code for each in done] == [0, 0, 0], [each.stderr for each in done]
    assert np.load("vectors.npy").shape == (100, SIZE)
