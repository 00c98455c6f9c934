"""Reads the records of an input: JSONL, plain text, CSV or Parquet, also compressed with gzip; or
the names of pictures.

Lines are counted from 1, blank ones included. A line that cannot be read becomes a record with a
problem, and reading continues after it. A whole input of another form is refused at its first line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import itertools
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, NoReturn, cast, get_args

from omlx_producer.bulk.pictures import PATH, PDF_SUFFIX, SUFFIXES, path_of, pictures_in
from omlx_producer.errors import InvalidRequest
from omlx_producer.terminal import counted
from omlx_producer.wire.json_limits import read_json

Format = Literal["jsonl", "text", "csv", "parquet", "pictures"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    **dict.fromkeys((*SUFFIXES, PDF_SUFFIX), "pictures"),
}
_SPREADSHEETS = {".xlsx", ".xlsm", ".xls", ".ods", ".numbers"}
# Of a CSV, those that names of columns rarely hold first.
_DELIMITERS = "\t|;,"
# The first line that Excel writes, and reads, to name the delimiter.
_SEPARATOR = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)
_AS_UTF_8 = "save the file as UTF-8, as iconv -f {} -t UTF-8 does"
_SPREADSHEET = "a spreadsheet or an archive; save it as CSV"
_UTF_16 = f"text in UTF-16; {_AS_UTF_8.format('UTF-16')}"
# What inputs that are no text in UTF-8 begin with.
_FOREIGN = {
    b"PK\x03\x04": _SPREADSHEET,
    b"\xd0\xcf\x11\xe0": _SPREADSHEET,
    b"\x1f\x8b": "compressed; give it a name in .gz, or unzip it",
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
}
# The first line of a JSON array, or of an object over several lines.
_WHOLE_JSON = re.compile(r"\s*(\[|\{\s*$)")
# What a byte that is not UTF-8 becomes.
_STRAY_BYTE = re.compile("[\udc80-\udcff]")
# The longest prompt of the protocol fits, with each character as one \uXXXX.
MAX_LINE_BYTES = 64 * 2**20
# Read at once, at most.
PARQUET_ROWS, PARQUET_BYTES = 256, 32 * 2**20
COUNT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """The content of one line or row of an input.

    Attributes:
        value: with a problem, what could be read; None if nothing.
        takes: whether the problem has taken lines that may be other rows.
        remedy: for an input whose first records all have this problem.
    """

    line: int
    value: str | dict[str, Any] | None
    problem: str = ""
    takes: bool = False
    remedy: str = ""


def format_of(name: str) -> Format:
    """The format of an input, from its name. Stdin is JSONL, and a folder has pictures.

    Raises:
        InvalidRequest: if the suffix is unknown.
    """
    if name == "-":
        return "jsonl"
    if Path(name).is_dir():
        return "pictures"
    suffix = Path(_unzipped(name)).suffix
    if suffix in _SPREADSHEETS:
        raise InvalidRequest(None, f"{name}: is a spreadsheet", "save it as CSV")
    if suffix not in _SUFFIXES:
        raise InvalidRequest(
            "format",
            f"missing, and {name} has no suffix that names it",
            f"give {', '.join(FORMATS)}",
        )
    return _SUFFIXES[suffix]


def delimiter_of(name: str) -> str | None:
    """What separates the cells of a CSV of this name; None if its first line tells."""
    return "\t" if Path(_unzipped(name)).suffix == ".tsv" else None


def csv_style(name: str, delimiter: str | None) -> tuple[str, str]:
    """What separates the cells of a CSV file, and its encoding, which tells a byte order mark.

    Args:
        delimiter: by default what its first line tells.
    """
    with open_input(name) as stream:
        first = stream.readline(MAX_LINE_BYTES)
    marked, header = first.startswith(codecs.BOM_UTF8), first.decode("utf-8-sig", "replace")
    named = _SEPARATOR.fullmatch(header)
    encoding = "utf-8-sig" if marked else "utf-8"
    return delimiter or (named[1] if named else _delimiter_in(header)), encoding


def _unzipped(name: str) -> str:
    return name.lower().removesuffix(".gz")


def read_records(stream: IO[bytes], kind: Format, delimiter: str | None = None) -> Iterator[Record]:
    """The records of an open input.

    Args:
        delimiter: of the cells of a CSV; by default what its first line has most of.

    Raises, while iterating:
        InvalidRequest: if the whole input is not of this format.
    """
    with _gzip_errors():
        if kind == "csv":
            yield from _read_csv(stream, delimiter)
        else:
            readers = {"jsonl": _read_jsonl, "text": _read_text, "parquet": _read_parquet}
            yield from readers[kind](stream)


@contextlib.contextmanager
def open_records(name: str, kind: Format, delimiter: str | None) -> Iterator[Iterator[Record]]:
    """The records of an input; refuses one without any.

    Args:
        delimiter: of the cells of a CSV; by default what its name or its first line tells.

    Raises, while iterating:
        InvalidRequest: if it has none, or is not of this format.
    """
    if kind == "pictures":
        named = enumerate(pictures_in(Path(name)), 1)
        paths = (Record(number, {PATH: path}) for number, path in named)
        kinds = f"{', '.join(suffix[1:] for suffix in SUFFIXES)} or pdf"
        yield some(paths, None, f"{name}: holds no pictures", f"give a folder that has {kinds}")
        return
    with open_input(name) as stream:
        records = read_records(stream, kind, delimiter or delimiter_of(name))
        yield some(records, None, f"{name}: holds no rows", "give an input that has some")


def some(
    records: Iterator[Record], field: str | None, problem: str, remedy: str
) -> Iterator[Record]:
    """The records; raises an InvalidRequest of these parts if there are none."""
    first = next(records, None)
    if first is None:
        raise InvalidRequest(field, problem, remedy)
    yield first
    yield from records


def input_columns(stream: IO[bytes], kind: Format, delimiter: str | None = None) -> dict[str, Any]:
    """The columns of an open input, with those types of Arrow that a table can take over.

    Plain text has one, ``prompt``. Objects of JSONL have all names that occur.

    Raises:
        InvalidRequest: if the whole input is not of this format.
    """
    if kind == "parquet":
        arrow, _ = import_pyarrow()
        fields = _open_parquet(stream).schema_arrow
        plain = arrow.types.is_primitive
        return {each.name: each.type if plain(each.type) else None for each in fields}
    columns: dict[str, Any] = {}
    for record in read_records(stream, kind, delimiter):
        columns |= dict.fromkeys(values_of(record))
        if columns and kind != "jsonl":
            break
    return columns


def values_of(record: Record) -> dict[str, Any]:
    """The values of a record by column, as far as it could be read, without bytes of pictures."""
    if isinstance(record.value, str):
        return {"prompt": record.value}
    return {name: path_of(value) for name, value in (record.value or {}).items()}


def estimate_rows(name: str, kind: Format) -> int:
    """The number of rows of a file; an estimate where lines may be blank.

    Raises:
        InvalidRequest: if it is no Parquet or gzip file although it is said to be one.
    """
    if kind == "pictures":
        return sum(1 for _ in pictures_in(Path(name)))
    with _gzip_errors(), open_input(name) as stream:
        if kind == "parquet":
            return int(_open_parquet(stream).metadata.num_rows)
        lines = last = quotes = 0
        while block := stream.read(COUNT_BYTES):
            # In CSV, a line break between quotes is part of a cell.
            parts = block.split(b'"') if kind == "csv" else [block]
            lines += sum(part.count(b"\n") for part in parts[quotes % 2 :: 2])
            quotes += len(parts) - 1
            last = block[-1]
    lines += last not in (0, 10)
    return max(0, lines - 1) if kind == "csv" else lines


@contextlib.contextmanager
def _gzip_errors() -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidRequest(
            None, f"the input is no whole gzip file ({error})", "compress it again"
        ) from None


@contextlib.contextmanager
def open_input(name: str) -> Iterator[IO[bytes]]:
    """Open an input as bytes, unzipped by its name. ``-`` is stdin, which stays open.

    Raises:
        InvalidRequest: if stdin is closed.
    """
    if name == "-":
        if sys.stdin is None:
            raise InvalidRequest(
                None, "-: stdin is closed", "give a file, or pipe the input into it"
            )
        yield sys.stdin.buffer
        return
    with Path(name).open("rb") as stream:
        if not name.lower().endswith(".gz"):
            yield stream
            return
        with gzip.open(stream) as unzipped:
            yield cast(IO[bytes], unzipped)


def import_pyarrow() -> tuple[Any, Any]:
    """The modules ``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        InvalidRequest: if pyarrow is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InvalidRequest(
            None,
            "Parquet needs pyarrow, which is not installed",
            "pip install 'omlx-queue[parquet]'",
        ) from None
    return arrow, parquet


def _lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers; None for a line that is too long."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        if number == 1:
            _refuse_foreign(line)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = stream.readline(MAX_LINE_BYTES)
            yield number, None
        else:
            yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _refuse_foreign(start: bytes) -> None:
    """Refuse an input that begins as no text in UTF-8 does."""
    for mark, what in _FOREIGN.items():
        if start.startswith(mark):
            raise InvalidRequest(None, f"the input is {what}")


def _read_text(stream: IO[bytes]) -> Iterator[Record]:
    for number, line in _lines(stream):
        record = _decoded(number, line)
        if record.problem or record.value:
            yield record


def _decoded(number: int, line: bytes | None) -> Record:
    if line is None:
        return Record(number, None, f"longer than {MAX_LINE_BYTES} bytes")
    text = line.decode(errors="surrogateescape").rstrip("\r\n")
    return Record(number, text if text.strip() else None, _stray_byte(text))


def _stray_byte(text: str) -> str:
    """The problem of a text that was not UTF-8; empty if it was."""
    found = _STRAY_BYTE.search(text)
    if found is None:
        return ""
    return f"not UTF-8 (byte 0x{ord(found[0]) - 0xDC00:02x}); {_AS_UTF_8.format('WINDOWS-1252')}"


def _read_jsonl(stream: IO[bytes]) -> Iterator[Record]:
    first = True
    for number, line in _lines(stream):
        record = _decoded(number, line)
        if isinstance(record.value, str):
            if first and (whole := _WHOLE_JSON.match(record.value)):
                query = "'.[]'" if whole[1] == "[" else "."
                raise InvalidRequest(
                    None,
                    "the input is JSON over several lines or in a list",
                    f"write each object on a line of its own, as jq -c {query} does",
                )
            first, parsed = False, _parsed(number, record.value)
            yield replace(parsed, problem=record.problem) if record.problem else parsed
        elif record.problem:
            yield record


def _parsed(number: int, text: str) -> Record:
    try:
        value = read_json(text, _refuse_constant)
    except InvalidRequest as error:
        return Record(number, None, str(error))
    except RecursionError:
        return Record(number, None, "nested too deeply")
    except ValueError as error:
        other = "" if text.lstrip().startswith("{") else "or give the format csv or text"
        return Record(number, None, f"not JSON ({error}); write an object a line", remedy=other)
    if not isinstance(value, dict):
        return Record(number, None, 'not a JSON object; write one, as in {"prompt": "Hi"}')
    return Record(number, value)


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(None, f"{name} is not JSON", "write null")


def _read_csv(stream: IO[bytes], delimiter: str | None) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    # A byte that is not UTF-8 becomes a lone surrogate, so it spoils its own row only.
    text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    try:
        yield from _read_csv_text(text, delimiter)
    finally:
        # Else the wrapper would close what is not its own.
        if not stream.closed:
            text.detach()


def _read_csv_text(text: IO[str], delimiter: str | None) -> Iterator[Record]:
    header, before = text.readline(), 0
    _refuse_foreign(header.encode(errors="surrogateescape"))
    if separator := _SEPARATOR.fullmatch(header):
        header, before, delimiter = text.readline(), 1, delimiter or separator[1]
    lines = itertools.chain([header], text)
    reader = csv.reader(lines, strict=True, delimiter=delimiter or _delimiter_in(header))
    try:
        columns = next(reader, None)
    except csv.Error as error:
        raise InvalidRequest(
            None,
            f"the CSV input's first line, which must name the columns, is not CSV ({error})",
            "correct it, or give what is between the cells as the delimiter",
        ) from None
    if not columns:
        raise InvalidRequest(None, "the CSV input is empty", "its first line must name the columns")
    if problem := _stray_byte("".join(columns)):
        raise InvalidRequest(None, f"the CSV input's first line is {problem}")
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise InvalidRequest(
            None, f"the CSV input's first line has more than one column {twice[0]!r}", "rename one"
        )
    while True:
        line = before + reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            last, problem = before + reader.line_num, f"not CSV ({error})"
            if last > line:
                problem += (
                    f"; a quote that begins there takes lines {line} to {last}; close it, or write "
                    "two for one that is text"
                )
            yield Record(line, None, problem, takes=last > line)
            continue
        problem = _stray_byte("".join(cells))
        if len(cells) > len(columns):
            known = counted(len(columns), "column")
            problem = (
                f"more cells than the {known}; quote each that has {reader.dialect.delimiter!r}"
            )
        if cells:
            values = dict(itertools.zip_longest(columns, cells[: len(columns)]))
            yield Record(line, values, problem)


def _delimiter_in(header: str) -> str:
    """What the first line of a CSV has most of outside of quotes, by default a comma."""
    bare = re.sub(r'"[^"]*("|$)', "", header)
    likely = max(_DELIMITERS, key=bare.count)
    return likely if likely in bare else ","


def _read_parquet(stream: IO[bytes]) -> Iterator[Record]:
    number, file = 0, _open_parquet(stream)
    batches = file.iter_batches(batch_size=_rows_at_once(file.metadata))
    while True:
        try:
            batch = next(batches, None)
            rows = None if batch is None else _python_values(batch)
        except (ValueError, OSError) as error:
            raise _no_parquet(error) from None
        if rows is None:
            return
        for values in rows:
            number += 1
            problem = (
                "" if values is not None else "holds a date that is not in the years 1 to 9999"
            )
            yield Record(number, values, problem)


def _rows_at_once(metadata: Any) -> int:
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    size: int = sum(group.total_byte_size for group in groups) // max(1, metadata.num_rows)
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES // max(1, size)))


def _python_values(batch: Any) -> list[dict[str, Any] | None]:
    """The rows of a batch; None for a row with a date that Python cannot hold."""
    try:
        rows: list[dict[str, Any] | None] = batch.to_pylist()
    except OverflowError:
        if len(batch) == 1:
            return [None]
        return [row for n in range(len(batch)) for row in _python_values(batch.slice(n, 1))]
    return rows


def _open_parquet(source: Path | IO[bytes]) -> Any:
    _, parquet = import_pyarrow()
    try:
        return parquet.ParquetFile(source)
    except ValueError as error:
        raise _no_parquet(error) from None


def _no_parquet(error: Exception) -> InvalidRequest:
    return InvalidRequest(
        None, f"the Parquet input cannot be read ({error})", "give a whole Parquet file"
    )
