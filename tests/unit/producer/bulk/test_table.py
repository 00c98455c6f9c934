"""Tables of results: their rows, their columns, and what becomes of answers in JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from omlx_producer.bulk.row import RowResult
from omlx_producer.bulk.table import properties_of
from tests.helpers.bulk_runs import errors
from tests.unit.producer.bulk.test_output import failed, ok, write


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_csv_has_a_row_for_each_result(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    write(out, ok("a", 1), ok('b"\n', 2), failed("c", 3), finish=True, ordered=True).close()
    rows = csv_rows(out)
    assert rows[0] == {
        "custom_id": "a",
        "text": "text of a",
        "finish_reason": "stop",
        "prompt_tokens": "1",
        "completion_tokens": "2",
        "error": "",
    }
    assert [r["custom_id"] for r in rows] == ["a", 'b"\n', "c"]
    assert (rows[2]["text"], rows[2]["error"]) == ("", "failed: out of memory")
    assert [line["custom_id"] for line in errors(out)] == ["c"]


def test_an_ordered_table_has_failures_in_their_places(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    write(out, ok("c", 3), failed("b", 2), ok("a", 1), finish=True, ordered=True).close()
    assert [r["custom_id"] for r in csv_rows(out)] == ["a", "b", "c"]


def test_a_table_has_each_choice_and_counts_tokens_once(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    two = ok("a")
    assert two.body
    two.body["choices"].append({"index": 1, "text": "other", "finish_reason": "length"})
    write(out, two, finish=True, with_body=True).close()
    first, second = csv_rows(out)
    assert (first["custom_id"], first["text"], first["completion_tokens"]) == (
        "a",
        "text of a",
        "2",
    )
    assert json.loads(first["response"]) == two.body
    assert (second["custom_id"], second["text"], second["finish_reason"]) == (
        *("a", "other"),
        "length",
    )
    assert second["completion_tokens"] == second["response"] == ""


def answered(custom_id: str, **message: Any) -> RowResult:
    """The result of a chat."""
    result = ok(custom_id)
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    assert result.body
    result.body["choices"] = [choice]
    return result


def test_the_properties_of_an_answer_are_columns(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    answers = [
        answered("a", content='{"name": "Ada", "born": 1815, "text": "x", "more": [1, "é"]}'),
        answered("b", content='{"name": null}'),
        answered("c", content='{"name": "cut'),
        answered("d", content="[1]"),
        failed("e"),
    ]
    properties = ("name", "born", "text", "more")
    write(out, *answers, finish=True, ordered=True, properties=properties).close()
    rows = csv_rows(out)
    columns = ("name", "born", "answer.text", "more")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("Ada", "1815", "x", '[1, "é"]'),
        *[("", "", "", "")] * 4,
    ]
    assert rows[2]["text"] == '{"name": "cut'


def test_properties_that_would_share_a_column_have_one_each(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    answer = answered("a", content='{"text": "first", "answer.text": "second"}')
    write(out, answer, finish=True, properties=("text", "answer.text")).close()
    (row,) = csv_rows(out)
    assert (row["answer.text"], row["answer.answer.text"]) == ("first", "second")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_lone_surrogate_in_an_answer_is_escaped_in_a_table(tmp_path: Path, suffix: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"out{suffix}"
    answer = answered("a", content='{"name": "a\\ud83d", "more": ["\\ud83d"]}')
    write(out, answer, finish=True, properties=("name", "more")).close()
    (row,) = csv_rows(out) if suffix == ".csv" else parquet.read_table(out).to_pylist()
    assert (row["name"], row["more"]) == ("a\\ud83d", '["\\ud83d"]')


@pytest.mark.parametrize(
    ("schema", "columns"),
    [
        ({"properties": {"b": {}, "a": {}}}, ["b", "a"]),
        (
            {"$ref": "#/$defs/Node", "$defs": {"Node": {"properties": {"b": {}, "a": {}}}}},
            ["b", "a"],
        ),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": {"properties": {"b": {}}}},
                "properties": {"a": {}},
            },
            ["a", "b"],
        ),
        ({"$ref": "#/$defs/none", "$defs": {}}, []),
        ({"$ref": "#/$defs", "$defs": [1]}, []),
        ({"$ref": "https://example.com/schema"}, []),
        ({"$ref": 5, "properties": 6}, []),
    ],
)
def test_the_columns_are_the_properties_at_the_top_of_the_schema(
    schema: dict[str, Any], columns: list[str]
) -> None:
    named = {"name": "answer", "schema": schema}
    assert properties_of({"type": "json_schema", "json_schema": named}) == columns
    assert properties_of(None) == []


def test_calls_of_tools_are_lines_of_json_in_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    only, beside = (
        answered("a", content=None, tool_calls=[call, call]),
        answered("b", content="I call.", tool_calls=[call]),
    )
    write(out, only, beside, finish=True, ordered=True).close()
    line = '{"name": "f", "arguments": "{}"}'
    assert [row["text"] for row in csv_rows(out)] == [f"{line}\n{line}", f"I call.\n{line}"]


def test_parquet_has_a_row_for_each_result(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    write(out, ok("a", 1), failed("b", 2), finish=True, ordered=True).close()
    table = parquet.read_table(out)
    assert table.column("custom_id").to_pylist() == ["a", "b"]
    assert table.column("completion_tokens").to_pylist() == [2, None]
    assert table.column("error").to_pylist() == [None, "failed: out of memory"]
    assert "response" not in table.column_names
