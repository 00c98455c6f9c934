"""Reading inputs: every record with its line, bad ones too, nothing held in memory."""

from __future__ import annotations

import datetime
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.bulk import records as records_module
from omlx_producer.bulk.records import (
    Record,
    delimiter_of,
    estimate_rows,
    format_of,
    input_columns,
    open_input,
    read_records,
)


def read(text: str | bytes, kind: Any = "jsonl") -> list[Record]:
    stream = io.BytesIO(text.encode() if isinstance(text, str) else text)
    return list(read_records(stream, kind))


def test_jsonl_has_an_object_a_line_and_blank_lines_count_but_are_no_rows() -> None:
    records = read('{"a": 1}\n\n  \r\n{"a": 2}')
    assert [(record.line, record.value) for record in records] == [(1, {"a": 1}), (4, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[1]", "not a JSON object"),
        ('{"a": NaN}', "NaN is not JSON; write null"),
        ("[" * 100_000, "nested too deeply"),
        (f"[{'[],' * 500_000}1]", "request: holds more than 100000 values beside its prompt"),
        ('{"a": 1} {"b": 2}', "not JSON"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_reading_goes_on(line: str, problem: str) -> None:
    _, bad, good = read(f'{{"a": 0}}\n{line}\n{{"a": 1}}\n')
    assert (bad.line, bad.value) == (2, None)
    assert problem in bad.problem
    assert (good.line, good.value) == (3, {"a": 1})


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ('[{"a": 1}, {"a": 2}]', "jq -c '.[]'"),
        ('\n [\n{"a": 1},\n{"a": 2}\n]\n', "jq -c '.[]'"),
        ('{\n  "a": 1\n}\n', "jq -c . "),
    ],
)
def test_json_that_is_no_object_a_line_is_refused_once_with_the_remedy(
    text: str, query: str
) -> None:
    with pytest.raises(InvalidRequest, match="write each object on a line of its own") as caught:
        read(text)
    assert query in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "text"])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"PK\x03\x04\x14", "a spreadsheet or an archive; save it as CSV"),
        (b"\xd0\xcf\x11\xe0\xa1", "a spreadsheet or an archive; save it as CSV"),
        (
            "id\ttext\n".encode("utf-16"),
            "text in UTF-16; save the file as UTF-8, as iconv -f UTF-16",
        ),
        (gzip.compress(b"id\n", mtime=0), "compressed; give it a name in .gz, or unzip it"),
    ],
)
def test_what_is_no_text_in_utf_8_is_refused_with_the_remedy(
    kind: Any, content: bytes, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"the input is {said}"):
        read(content, kind)


@pytest.mark.parametrize(
    ("kind", "content", "value"),
    [
        ("csv", b"id,text\n1,caf\xe9\n2,plain\n", {"id": "1", "text": "caf\udce9"}),
        ("jsonl", b'\n{"id": 1, "text": "caf\xe9"}\n{}\n', {"id": 1, "text": "caf\udce9"}),
        ("text", b"\ncaf\xe9\nplain\n", "caf\udce9"),
    ],
)
def test_a_line_that_is_not_utf_8_is_a_bad_one_that_keeps_what_could_be_read(
    kind: Any, content: bytes, value: Any
) -> None:
    bad, good = read(content, kind)
    assert (bad.line, bad.value, good.problem) == (2, value, "")
    assert bad.problem == (
        "not UTF-8 (byte 0xe9); save the file as UTF-8, as iconv -f WINDOWS-1252 -t UTF-8 does"
    )


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    assert read(b'\xef\xbb\xbf{"a": 1}\n')[0].value == {"a": 1}
    assert read(b"\xef\xbb\xbfa,b\n1,2\n", "csv")[0].value == {"a": "1", "b": "2"}


def test_a_line_longer_than_the_limit_is_skipped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_LINE_BYTES", 10)
    bad, good = read("x" * 35 + "\nshort\n", "text")
    assert "longer than 10 bytes" in bad.problem
    assert good == Record(2, "short")


def test_text_is_a_prompt_a_line_with_its_own_blanks() -> None:
    assert read("  def f():\r\n\nx\n", "text") == [Record(1, "  def f():"), Record(3, "x")]


def test_csv_rows_may_span_lines_and_lack_or_exceed_cells() -> None:
    records = read('id,text\n1,"two\nlines"\n2\n3,a,b\n4,last\n', "csv")
    assert [record.line for record in records] == [2, 4, 5, 6]
    assert records[0].value == {"id": "1", "text": "two\nlines"}
    assert records[1].value == {"id": "2", "text": None}
    assert records[2].value == {"id": "3", "text": "a"}
    assert "more cells than the 2 columns; quote each that has ','" in (records[2].problem)
    assert records[3].value == {"id": "4", "text": "last"}


def test_blank_lines_of_csv_count_but_are_no_rows() -> None:
    records = read('text\n\na\n\n\nb,c\n"d\n\ne"\n\n', "csv")
    assert [record.line for record in records] == [3, 6, 7]
    assert "more cells than the 1 column;" in records[1].problem
    assert [records[0].value, records[2].value] == [{"text": "a"}, {"text": "d\n\ne"}]


def test_a_csv_header_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"first line is not UTF-8 \(byte 0xe9\); save the file"
    ):
        read("caf\xe9\na\n".encode("latin-1"), "csv")


def test_reading_csv_leaves_the_stream_open() -> None:
    stream = io.BytesIO(b"a\n1\n")
    assert len(list(read_records(stream, "csv"))) == 1
    assert not stream.closed


def test_csv_without_a_header_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="its first line must name the columns"):
        read("", "csv")


def test_a_csv_header_that_names_two_columns_alike_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than one column 'a'; rename one"):
        read("a,b,a\n1,2,3\n", "csv")


def test_a_csv_header_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="first line, which must name the columns, is not CSV"):
        read('"a"b,c\n1,2\n', "csv")


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    path.write_text("nonsense")
    with pytest.raises(InvalidRequest, match=r"cannot be read .* give a whole Parquet file"):
        read(path.read_bytes(), "parquet")
    with pytest.raises(InvalidRequest, match="give a whole Parquet file"):
        estimate_rows(str(path), "parquet")


def test_parquet_that_is_broken_inside_is_refused_behind_its_good_rows(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = [f"{n} " + "x" * 200 for n in range(2 * records_module.PARQUET_ROWS)]
    table = arrow.table({"text": texts})
    parquet.write_table(
        table,
        path,
        row_group_size=records_module.PARQUET_ROWS,
        compression="none",
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    second = parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[second : second + 2000] = b"\xff" * 2000
    records = read_records(io.BytesIO(bytes(data)), "parquet")
    assert next(records).value == {"text": texts[0]}
    with pytest.raises(InvalidRequest, match="give a whole Parquet file"):
        list(records)


def test_parquet_texts_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    texts = arrow.array([b"\xff"]).view(arrow.string())
    parquet.write_table(arrow.table({"text": texts}), path)
    with pytest.raises(InvalidRequest, match="give a whole Parquet file"):
        read(path.read_bytes(), "parquet")


def test_a_parquet_date_that_python_cannot_hold_is_a_bad_row(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    dates = arrow.array([0, 2**62, 1, 2**62], arrow.timestamp("us"))
    parquet.write_table(arrow.table({"at": dates}), path)
    records = read(path.read_bytes(), "parquet")
    assert [record.line for record in records] == [1, 2, 3, 4]
    assert [record.value is None for record in records] == [False, True, False, True]
    assert "a date that is not in the years 1 to 9999" in records[1].problem


def test_parquet_rows_come_in_order(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    table = arrow.table({"text": [f"t{n}" for n in range(600)], "n": list(range(600))})
    parquet.write_table(table, path, row_group_size=100)
    with path.open("rb") as stream:
        records = list(read_records(stream, "parquet"))
    assert [record.line for record in records] == list(range(1, 601))
    assert records[599].value == {"text": "t599", "n": 599}
    assert estimate_rows(str(path), "parquet") == 600


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.jsonl", "jsonl"), ("A.CSV", "csv"), ("a.txt", "text"), ("-", "jsonl")],
)
def test_the_name_says_the_format(name: str, kind: str) -> None:
    assert format_of(name) == kind


def test_a_name_that_does_not_say_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        InvalidRequest,
        match=r"format: missing, and rows\.dat has no suffix that names it; give jsonl, text",
    ):
        format_of("rows.dat")
    with pytest.raises(InvalidRequest, match=r"rows\.XLSX: is a spreadsheet; save it as CSV"):
        format_of("rows.XLSX")


@pytest.mark.parametrize(
    ("text", "kind", "rows"),
    [
        ("", "text", 0),
        ("a", "text", 1),
        ("a\nb\n", "text", 2),
        ("h\na\nb\n", "csv", 2),
        ('h\n"a\nb"\n"c""\nd"\n', "csv", 2),
    ],
)
@pytest.mark.parametrize("block", [1, 1024])
def test_rows_are_estimated_from_lines(
    tmp_path: Path, text: str, kind: Any, rows: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omlx_producer.bulk.records.COUNT_BYTES", block)
    path = tmp_path / "rows"
    path.write_text(text)
    assert estimate_rows(str(path), kind) == rows


def test_reading_does_not_run_ahead_of_its_reader() -> None:
    stream = io.BytesIO(b"".join(json.dumps({"n": n}).encode() + b"\n" for n in range(10_000)))
    records = read_records(stream, "jsonl")
    next(records)
    assert stream.tell() < 100


def test_a_closed_stdin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InvalidRequest, match=r"^-: stdin is closed; give a file"), open_input("-"):
        pytest.fail("it reads")


@pytest.mark.parametrize(
    ("name", "kind", "delimiter"),
    [
        ("a.tsv", "csv", "\t"),
        ("a.TSV.gz", "csv", "\t"),
        ("a.csv.gz", "csv", None),
        ("a.jsonl.gz", "jsonl", None),
        ("a.txt.GZ", "text", None),
    ],
)
def test_names_tell_the_format_also_of_zipped_files(
    name: str, kind: str, delimiter: str | None
) -> None:
    assert (format_of(name), delimiter_of(name)) == (kind, delimiter)


@pytest.mark.parametrize(
    ("header", "delimiter", "columns"),
    [
        ("a,b\n", None, ["a", "b"]),
        ("a;b\n", None, ["a", "b"]),
        ("a\tb\r\n", None, ["a", "b"]),
        ('\ufeff"a;x;y",b\n', None, ["a;x;y", "b"]),
        ("net, of tax;b\n", None, ["net, of tax", "b"]),
        ('b;"two\nlines, x"\n', None, ["b", "two\nlines, x"]),
        ("a|b\n", None, ["a", "b"]),
        ("a|b,c\n", "|", ["a", "b,c"]),
        ("a;x,b\n", ",", ["a;x", "b"]),
        ("alone\n", None, ["alone"]),
        ("\ufeffsep=;\r\na,x;b\r\n", None, ["a,x", "b"]),
        ('"sep=|"\na|b\n', None, ["a", "b"]),
        ("sep=;\na,b\n", ",", ["a", "b"]),
    ],
)
def test_the_first_line_of_a_csv_tells_its_delimiter(
    header: str, delimiter: str | None, columns: list[str]
) -> None:
    (record,) = read_records(io.BytesIO(f'{header}"1\n2"\n'.encode()), "csv", delimiter)
    assert record.value == dict(zip(columns, ["1\n2", None], strict=False))
    assert record.line == 1 + header.count("\n")


def test_a_zipped_file_is_read_as_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress(b'a\tb\n1\t"2\n3"\n4\t5\n'))
    with open_input(str(path)) as stream:
        records = list(read_records(stream, "csv", "\t"))
    assert [record.value for record in records] == [{"a": "1", "b": "2\n3"}, {"a": "4", "b": "5"}]
    assert estimate_rows(str(path), "csv") == 2


@pytest.mark.parametrize("broken", ["cut", "other", "spoilt"])
def test_a_broken_zipped_file_is_told(tmp_path: Path, broken: str) -> None:
    path, whole = tmp_path / "rows.txt.gz", gzip.compress(b"line\n" * 1000)
    spoilt = whole[:20] + b"\xff" * 20 + whole[40:]
    path.write_bytes({"cut": whole[:-9], "other": b"hello", "spoilt": spoilt}[broken])
    with pytest.raises(InvalidRequest, match="is no whole gzip file"), open_input(str(path)) as s:
        list(read_records(s, "text"))
    with pytest.raises(InvalidRequest, match="is no whole gzip file"):
        estimate_rows(str(path), "text")


def test_the_columns_of_an_input_are_known_in_their_order() -> None:
    def columns(text: str, kind: Any) -> list[str]:
        return list(input_columns(io.BytesIO(text.encode()), kind))

    assert columns("b,a\n1,2,3\n1,2\n", "csv") == ["b", "a"]
    assert columns('nonsense\n{"b": 1}\n{"a": 1, "b": 2}\n', "jsonl") == ["b", "a"]
    assert columns("hello\n", "text") == ["prompt"]
    assert columns("b,a\n", "csv") == []


def test_plain_columns_of_parquet_keep_their_types() -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"s": ["x"], "n": [1], "d": [datetime.date(2026, 1, 2)], "l": [[1]]})
    stream = io.BytesIO()
    parquet.write_table(table, stream)
    types = {name: str(type_) for name, type_ in input_columns(stream, "parquet").items()}
    assert types == {"s": "None", "n": "int64", "d": "date32[day]", "l": "None"}
