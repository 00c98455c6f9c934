"""Tables of results: their rows, their columns, and what becomes of answers in JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlx_producer.bulk.records import Record
from omlx_producer.bulk.row import RowResult
from omlx_producer.bulk.table import (
    JSON,
    ROW_GROUP,
    TEXT,
    TableForm,
    columns_of,
    properties_of,
    safe_cell,
)
from tests.helpers.bulk_runs import errors
from tests.helpers.row_results import bad, failed, ok, write


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
    write(out, two, finish=True, form=TableForm(with_body=True)).close()
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
    form = TableForm(properties=dict.fromkeys(("name", "born", "text", "more"), JSON))
    write(out, *answers, finish=True, ordered=True, form=form).close()
    rows = csv_rows(out)
    columns = ("name", "born", "answer.text", "more")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("Ada", "1815", "x", '[1, "é"]'),
        *[("", "", "", "")] * 4,
    ]
    assert rows[2]["text"] == '{"name": "cut'


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_probabilities_of_choices_are_columns_of_numbers(tmp_path: Path, suffix: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"out{suffix}"
    decided, other = ok("a"), ok("b")
    assert decided.body
    decided.body["choices"][0]["probabilities"] = {"text": 0.75, '{"text": 1}': 0.25}
    form = TableForm(properties=columns_of(None, ["text", '{"text": 1}']))
    write(out, decided, other, failed("c"), finish=True, form=form).close()
    rows = csv_rows(out) if suffix == ".csv" else parquet.read_table(out).to_pylist()
    cells = [(row["answer.text"], row['{"text": 1}']) for row in rows]
    none = "" if suffix == ".csv" else None
    told = ("0.75", "0.25") if suffix == ".csv" else (0.75, 0.25)
    assert cells == [told, (none, none), (none, none)]


def test_properties_that_would_share_a_column_have_one_each(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    answer = answered("a", content='{"text": "first", "answer.text": "second"}')
    form = TableForm(properties={"text": TEXT, "answer.text": TEXT})
    write(out, answer, finish=True, form=form).close()
    (row,) = csv_rows(out)
    assert (row["answer.text"], row["answer.answer.text"]) == ("first", "second")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_lone_surrogate_in_an_answer_is_escaped_in_a_table(tmp_path: Path, suffix: str) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / f"out{suffix}"
    answer = answered("a", content='{"name": "a\\ud83d", "more": ["\\ud83d"]}')
    form = TableForm(properties={"name": TEXT, "more": "text[]"}, kept={"input": None})
    write(out, answer, finish=True, form=form, source=[Record(1, {"input": "b\ud83d"})]).close()
    (row,) = csv_rows(out) if suffix == ".csv" else parquet.read_table(out).to_pylist()
    more = '["\\ud83d"]' if suffix == ".csv" else ["\\ud83d"]
    assert (row["name"], row["more"], row["input"]) == ("a\\ud83d", more, "b\\ud83d")


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
    assert list(properties_of({"type": "json_schema", "json_schema": named})) == columns
    assert properties_of(None) == {}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "text"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"type": ["integer", "number"]}, "number"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "boolean"),
        ({"anyOf": [{"type": "boolean"}, {"type": "string"}]}, "json"),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, "number"),
        ({"$ref": "#/$defs/n"}, "number"),
        ({"$ref": "#/$defs/loop"}, "json"),
        ({"$ref": "#/$defs/none"}, "json"),
        ({"enum": ["a", "b", None]}, "text"),
        ({"const": 5}, "integer"),
        ({"enum": [1, True]}, "json"),
        (
            {"type": "array", "items": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
            "number[][]",
        ),
        ({"type": "array", "items": {"type": "object"}}, "json"),
        ({"type": "array"}, "json"),
        ({"type": "object", "properties": {}}, "json"),
        ({"type": 5}, "json"),
        ({"enum": 5}, "json"),
        (True, "json"),
        ({}, "json"),
    ],
)
def test_a_property_has_the_kind_of_its_schema(schema: Any, kind: str) -> None:
    definitions = {"n": {"type": "number"}, "loop": {"$ref": "#/$defs/loop"}}
    whole = {"properties": {"a": schema}, "$defs": definitions}
    assert properties_of({"json_schema": {"schema": whole}}) == {"a": kind}


def test_parquet_columns_have_the_types_of_the_schema(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.parquet"
    answers = [
        answered(
            "a", content='{"t": "x", "i": 3.0, "n": 3, "b": false, "l": [1, 2], "o": {"k": "é"}}'
        ),
        answered("b", content='{"t": 1, "i": 3.5, "n": true, "b": "false", "l": 5, "o": null}'),
        answered("c", content=f'{{"i": {2**63}, "n": 1{"0" * 400}, "b": 0, "l": ["x", null]}}'),
        answered("d", content='{"i": true, "n": NaN'),
        failed("e"),
    ]
    kinds = {"t": "text", "i": "integer", "n": "number", "b": "boolean", "l": "integer[]"}
    form = TableForm(properties=kinds | {"o": "json"})
    write(out, *answers, finish=True, ordered=True, form=form).close()
    table = parquet.read_table(out)
    types = {name: str(table.schema.field(name).type) for name in (*kinds, "o")}
    assert types == {
        "t": "string",
        "i": "int64",
        "n": "double",
        "b": "bool",
        "l": "list<element: int64>",
        "o": "string",
    }
    rows = [tuple(row[name] for name in types) for row in table.to_pylist()]
    assert rows == [
        ("x", 3, 3.0, False, [1, 2], '{"k": "é"}'),
        ("1", None, None, None, None, None),
        (None, None, None, None, [None, None], None),
        *[(None,) * 6] * 2,
    ]
    # What has no place in a column is still in the text.
    assert str(2**63) in table.column("text").to_pylist()[2]


FORMULAS = [
    *("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "'quoted", "''"),
    *(" =1", "\u3000 @SUM(A1)", "\xa0-2+3", "\ufeff=1", "\u200b=1"),
    *("\uff1d1+1", "\uff0b1", "\uff0d2+3", "\uff20SUM(A1)", " \uff1d1"),
]
HARMLESS = ["", "text", "-3", " -3", "+1.5e-7", "-1,000.5", "a=b", " a", "\uff11"]


def test_no_cell_of_a_csv_is_a_formula_unless_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    answers = [answered(f"{n}", content=text) for n, text in enumerate(FORMULAS + HARMLESS)]
    for form, shown in (
        (TableForm(), [f"'{text}" for text in FORMULAS] + HARMLESS),
        (TableForm(csv_safe=False), FORMULAS + HARMLESS),
    ):
        write(out, *answers, finish=True, ordered=True, form=form).close()
        assert [row["text"] for row in csv_rows(out)] == shown


def test_properties_ids_and_kept_columns_are_no_formulas_either(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    answer = answered("=id", content='{"a": "=1", "b": -3, "c": ["=1"]}')
    form = TableForm(properties=dict.fromkeys("abc", JSON), kept={"k": None, "l": None})
    source = [Record(1, {"k": "=2", "l": "-4"})]
    write(out, answer, finish=True, form=form, source=source).close()
    (row,) = csv_rows(out)
    cells = tuple(row[name] for name in ("custom_id", "a", "b", "c", "k", "l"))
    assert cells == ("'=id", "'=1", "-3", '["=1"]', "'=2", "-4")


@pytest.mark.parametrize("safe", [True, False])
def test_names_of_columns_are_no_formulas_either(tmp_path: Path, safe: bool) -> None:
    out = tmp_path / "out.csv"
    names = ["@SUM(1)", "=HYPERLINK(1)"]
    form = TableForm(properties={names[0]: TEXT}, kept={names[1]: None}, csv_safe=safe)
    answer = answered("a", content=json.dumps({names[0]: "answer"}))
    write(out, answer, finish=True, form=form, source=[Record(1, {names[1]: "input"})]).close()
    (row,) = csv_rows(out)
    assert [row["'" * safe + name] for name in names] == ["answer", "input"]


@given(st.text(st.sampled_from("'=+-@\t\na1, \uff1d")))
def test_removing_a_leading_mark_gives_back_every_text(text: str) -> None:
    cell = safe_cell(text)
    assert cell.removeprefix("'") == text
    assert cell == text or cell[1:] == text


def test_kept_columns_come_first_and_each_row_has_its_own_values(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    source = [
        Record(2, {"b": "2b", "text": "2t", "a": None}),
        Record(3, None, "not CSV"),
        Record(5, {"b": "5b", "text": "5t", "a": 5}),
        Record(6, {"b": "6b", "text": "6t", "a": [6]}),
    ]
    two = ok("r6", 6)
    assert two.body
    two.body["choices"] *= 2
    form = TableForm(properties={"a": TEXT}, kept=dict.fromkeys(("b", "text", "a")))
    write(out, ok("gone", 0)).close()
    write(out, two, bad(3), failed("r5", 5), finish=True, form=form, source=source).close()
    rows = csv_rows(out)
    assert list(rows[0]) == [
        *("b", "input.text", "a", "custom_id", "text", "finish_reason", "prompt_tokens"),
        *("completion_tokens", "error", "answer.a"),
    ]
    cells = [(row["b"], row["input.text"], row["a"], row["custom_id"]) for row in rows]
    assert cells == [
        ("", "", "", ""),
        ("5b", "5t", "5", "r5"),
        *[("6b", "6t", "[6]", "r6")] * 2,
        ("", "", "", "gone"),
    ]
    assert errors(out)


def test_a_table_of_many_rows_is_in_the_order_of_the_input(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    out, count = tmp_path / "out.parquet", 2 * ROW_GROUP
    source = [Record(n, {"k": str(n)}) for n in range(1, count)]
    results = [ok(f"r{n}", n) for n in reversed(range(1, count))]
    form = TableForm(kept={"k": None})
    write(out, *results, finish=True, form=form, source=source).close()
    table = parquet.read_table(out)
    assert table.column("k").to_pylist() == [str(n) for n in range(1, count)]
    assert table.column("custom_id").to_pylist() == [f"r{n}" for n in range(1, count)]


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
