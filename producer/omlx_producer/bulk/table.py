"""The table of results, CSV or Parquet: a line for each choice, and one for each failed row.

The token counts are those of a row with all its choices, so only its first line has them.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import decimal
import io
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from omlx_producer.bulk.durable import replacing
from omlx_producer.bulk.npy import write_npy
from omlx_producer.bulk.records import import_pyarrow
from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import answer_text
from omlx_producer.wire.answer import as_completion
from omlx_producer.wire.embedding import read_vector
from omlx_producer.wire.json_schema import resolve

ANSWER, INPUT = "answer.", "input."
ROW_GROUP = 512
MAX_LEVELS = 8
LARGEST_INTEGER = 2**63 - 1

# The kinds of cells. A list of one of them has the suffix LIST. Anything else is JSON.
TEXT, INTEGER, NUMBER, BOOLEAN, JSON, LIST = "text", "integer", "number", "boolean", "json", "[]"
VECTOR = "vector"
_KINDS = {"string": TEXT, "integer": INTEGER, "number": NUMBER, "boolean": BOOLEAN}

# What makes a spreadsheet take a text for a formula, also in full width and behind blanks, and the
# mark, so that it can be undone.
_FORMULA = re.compile(r"[\s\u200b\ufeff]*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n']")
_PLAIN_NUMBER = re.compile(r"[+-]?[0-9]+([.,][0-9]+)*([eE][+-]?[0-9]+)?")


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        path: to its cell in a line: ``custom_id``, ``error``, ``body``, the ``choice`` of the line,
            the ``answer`` in it, the ``input``, or a field of the completion.
        type: of Arrow, of values that have it already; else the kind says which.
    """

    name: str
    kind: str
    path: tuple[str, ...]
    type: Any = None

    def cell(self, line: Any) -> Any:
        """Its cell of a line; None without one."""
        for name in self.path:
            line = line.get(name) if isinstance(line, dict) else None
        return line

    def value(self, line: Mapping[str, Any]) -> Any:
        """Its cell of a line, as its type has it."""
        return self.cell(line) if self.type else _typed(self.cell(line), self.kind)


_ID, _ERROR = Column("custom_id", TEXT, ("custom_id",)), Column("error", TEXT, ("error",))
_PROMPT_TOKENS = Column("prompt_tokens", INTEGER, ("usage", "prompt_tokens"))
COLUMNS = (
    _ID,
    Column("text", TEXT, ("choice", "text")),
    Column("finish_reason", TEXT, ("choice", "finish_reason")),
    _PROMPT_TOKENS,
    Column("completion_tokens", INTEGER, ("usage", "completion_tokens")),
    _ERROR,
)
VECTOR_COLUMNS = (_ID, Column("embedding", VECTOR, ("choice", "embedding")), _PROMPT_TOKENS, _ERROR)
BODY = Column("response", JSON, ("body",))


@dataclass(frozen=True)
class TableForm:
    """What a table has besides its fixed columns.

    Attributes:
        with_body: whether the whole response is a column, `BODY`.
        properties: the properties of answers in JSON, or the choices of a decision, with their
            kinds, a column each. A name that another column has gets the prefix `ANSWER`.
        kept: the columns of the input with their Arrow types, None for text. They come first. One
            with the name of a fixed column has the prefix `INPUT`.
        vectors: whether the lines have vectors in place of texts.
        csv_safe: whether a CSV has no cell that a spreadsheet runs as a formula; see `safe_cell`.
        delimiter: of the cells of a CSV; ``encoding`` likewise.
    """

    with_body: bool = False
    properties: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    csv_safe: bool = True
    vectors: bool = False
    delimiter: str = ","
    encoding: str = "utf-8"


PLAIN = TableForm()


def columns_asked(fields: Mapping[str, Any]) -> dict[str, str]:
    """The columns for answers to requests with these fields, with their kinds."""
    form = fields.get("structured_outputs") or {}
    choices = form.get("choice") if fields.get("probabilities") else None
    return columns_of(fields.get("response_format"), choices)


def columns_of(
    response_format: Mapping[str, Any] | None, choices: Iterable[str] | None
) -> dict[str, str]:
    """The columns for answers in this format, and for the probabilities of these choices."""
    return properties_of(response_format) | dict.fromkeys(choices or (), NUMBER)


def properties_of(response_format: Mapping[str, Any] | None) -> dict[str, str]:
    """The properties at the top of answers in this format with their kinds, through a local
    ``$ref`` at the top."""
    named = (response_format or {}).get("json_schema") or {}
    schema = named.get("schema", {})
    tops = [schema]
    with contextlib.suppress(LookupError):
        tops.append(_followed(schema, schema))
    found: dict[str, Any] = {}
    for top in tops:
        properties = top.get("properties") if isinstance(top, dict) else None
        if isinstance(properties, dict):
            found |= properties
    return {name: _kind(inner, schema) for name, inner in found.items()}


def _followed(schema: Any, root: Any) -> Any:
    """What a schema's local ``$ref`` names; the schema itself without one.

    Raises:
        LookupError: if nothing has that name.
    """
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if isinstance(reference, str) and reference.startswith("#/"):
        return resolve(reference, root)
    return schema


def _kind(schema: Any, root: Any, levels: int = MAX_LEVELS) -> str:
    """The kind of the values that match a schema, null aside."""
    with contextlib.suppress(LookupError):
        schema = _followed(schema, root)
    if not isinstance(schema, dict) or not levels:
        return JSON
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(name), list):
            others = [choice for choice in choices if choice != {"type": "null"}]
            return _common(_kind(choice, root, levels - 1) for choice in others)
    given = schema.get("type")
    if given == "array":
        inner = _kind(schema["items"], root, levels - 1) if "items" in schema else JSON
        return JSON if inner == JSON or "prefixItems" in schema else inner + LIST
    if given is not None:
        names = given if isinstance(given, list) else [given]
        return _common(_KINDS.get(str(name), JSON) for name in names if name != "null")
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list):
        return JSON
    kinds = {str: TEXT, int: INTEGER, float: NUMBER, bool: BOOLEAN}
    return _common(kinds.get(type(value), JSON) for value in values if value is not None)


def _common(kinds: Iterable[str]) -> str:
    found: set[str] = set()
    for kind in kinds:
        # At once: a recursive schema may have more branches than there is time for.
        if kind == JSON:
            return JSON
        found.add(kind)
    if found == {INTEGER, NUMBER}:
        return NUMBER
    return found.pop() if len(found) == 1 else JSON


class Layout:
    """The columns of a table, and its lines.

    Attributes:
        columns: in order.
        kept: the columns of the input by their names here.
    """

    def __init__(self, form: TableForm) -> None:
        own = [*(VECTOR_COLUMNS if form.vectors else COLUMNS), *([BODY] if form.with_body else ())]
        fixed = {column.name for column in own}
        self.kept = {(f"{INPUT}{name}" if name in fixed else name): name for name in form.kept}
        self.columns = [
            Column(here, TEXT, ("input", name), form.kept[name]) for here, name in self.kept.items()
        ]
        self.columns += own
        for name, kind in form.properties.items():
            column = name
            while column in {other.name for other in self.columns}:
                column = f"{ANSWER}{column}"
            self.columns.append(Column(column, kind, ("answer", name)))
        self._has_answers = bool(form.properties)

    def lines(
        self, document: Mapping[str, Any], values: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """What the columns read of each line of an output line.

        Args:
            values: of its row in the input.
        """
        line: dict[str, Any] = {"custom_id": document["custom_id"], "input": values}
        error = document["error"]
        once = {"error": error and f"{error['code']}: {error['message']}"}
        if document["response"] is None:
            yield line | once
            return
        body = document["response"]["body"]
        once = {**as_completion(body), "body": body, **once}
        for choice in _choices(once):
            answer = _answer(choice) if self._has_answers else None
            yield once | line | {"choice": choice, "answer": answer}
            once = {}


def write_table(
    rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
    output: Path,
    form: TableForm,
    *,
    like: Path,
) -> None:
    """Write the table of output lines. Of a line with a result and an error, a later try failed.

    Args:
        rows: output lines, each with the values of its row in the input.
        like: a new table gets the permissions of this file.

    Raises:
        InvalidRequest: if Parquet is asked for without pyarrow, or an array of rows of which one
            has several vectors, or one of another length.
        OSError: if the file cannot be written.
    """
    if output.suffix.lower() == ".npy":
        with replacing(output, like=like) as stream:
            write_npy(_vectors_of(rows), stream)
        return
    layout = Layout(form)
    lines = (line for document, values in rows for line in layout.lines(document, values))
    with replacing(output, like=like) as stream:
        if output.suffix.lower() == ".parquet":
            _write_parquet(lines, layout.columns, stream)
        else:
            _write_csv(lines, layout.columns, stream, form)


def _choices(completion: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The choices of a completion, with their texts, or its vectors as choices."""
    for each in completion.get("data", ()):
        yield {**each, "text": each["embedding"]}
    for choice in completion.get("choices", ()):
        yield {**choice, "text": answer_text(choice)}


def _vectors_of(
    rows: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> Iterator[array[float] | None]:
    """The vector of each output line; None of one that failed.

    Raises:
        InvalidRequest: if a line has several vectors, or one of another length than those before.
    """
    size = 0
    for document, _ in rows:
        if document["error"] or not document["response"]:
            yield None
            continue
        vector, *others = (
            read_vector(each["embedding"]) for each in document["response"]["body"]["data"]
        )
        if others or len(vector) != (size or len(vector)):
            got = f"{1 + len(others)} vectors" if others else f"{len(vector)} numbers, not {size}"
            raise InvalidRequest(
                "output",
                f"row {document['custom_id']!r:.80} has {got}; an array has one line of one length "
                "for each row",
                "give an output in .parquet",
            )
        size = len(vector)
        yield vector


def _answer(choice: Mapping[str, Any]) -> Any:
    """The probabilities of a decision, or the JSON that an answer is; None if it is none."""
    # A vector may be a list of numbers.
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return choice.get("probabilities") or json.loads(choice["text"])
    return None


def _as_text(value: Any) -> str | None:
    """A text as it is, another value as JSON. Lone surrogates, which UTF-8 lacks, are escaped."""
    if value is None:
        return None
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        value = str(value)
    elif not isinstance(value, str):
        value = json.dumps(value, default=str, ensure_ascii=False)
    return str(value).encode(errors="backslashreplace").decode()


def safe_cell(cell: str) -> str:
    """A text with ``'`` in front if a spreadsheet could take it for a formula.

    Texts that begin with ``'`` get another one, so removing one from each text that begins with it
    gives back all texts. Plain numbers stay.
    """
    if _FORMULA.match(cell) and not _PLAIN_NUMBER.fullmatch(cell.lstrip(" ")):
        return f"'{cell}"
    return cell


def _write_csv(
    rows: Iterator[dict[str, Any]], columns: list[Column], stream: IO[bytes], form: TableForm
) -> None:
    text = io.TextIOWrapper(stream, form.encoding, newline="")
    writer = csv.writer(text, delimiter=form.delimiter)
    names = [column.name for column in columns]
    for row in itertools.chain([names], ([each.cell(row) for each in columns] for row in rows)):
        cells = [_as_text(cell) for cell in row]
        writer.writerow([cell and safe_cell(cell) for cell in cells] if form.csv_safe else cells)
    text.detach()


def _write_parquet(
    rows: Iterator[dict[str, Any]], columns: list[Column], stream: IO[bytes]
) -> None:
    arrow, parquet = import_pyarrow()
    scalars = {INTEGER: arrow.int64(), NUMBER: arrow.float64(), BOOLEAN: arrow.bool_()}

    def type_of(kind: str) -> Any:
        if kind == VECTOR:
            return arrow.list_(arrow.float32())
        if kind.endswith(LIST):
            return arrow.list_(type_of(kind.removesuffix(LIST)))
        return scalars.get(kind, arrow.string())

    schema = arrow.schema([(each.name, each.type or type_of(each.kind)) for each in columns])
    # Numbers of vectors hardly repeat.
    repeating = [each.name for each in columns if each.kind != VECTOR]
    with parquet.ParquetWriter(stream, schema, use_dictionary=repeating) as writer:
        while chunk := list(itertools.islice(rows, ROW_GROUP)):
            cells = [{each.name: each.value(row) for each in columns} for row in chunk]
            writer.write_table(arrow.Table.from_pylist(cells, schema=schema))


def _typed(value: Any, kind: str) -> Any:
    """A value as one of its kind; None if it is of another."""
    if kind == VECTOR:
        return value and read_vector(value)
    if kind.endswith(LIST):
        inner = kind.removesuffix(LIST)
        return [_typed(each, inner) for each in value] if isinstance(value, list) else None
    if kind in (TEXT, JSON):
        return _as_text(value)
    if kind == BOOLEAN or isinstance(value, bool):
        return value if kind == BOOLEAN and isinstance(value, bool) else None
    if not isinstance(value, int | float):
        return None
    if kind == INTEGER:
        whole = value == value // 1 and abs(value) <= LARGEST_INTEGER
        return int(value) if whole else None
    try:
        return float(value)
    except OverflowError:
        return None
