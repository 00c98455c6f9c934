"""How the records of an input become requests."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from omlx_producer.bulk.pictures import PATH, path_of, read_picture, with_picture
from omlx_producer.bulk.records import Format, Record
from omlx_producer.bulk.row import (
    NO_MODEL,
    BadRow,
    Row,
    default_id,
    digest_of,
    named_field,
    place_of,
)
from omlx_producer.client.compiling import require_compilable
from omlx_producer.client.models import (
    only_model,
    require_fit,
    require_known,
    require_served,
    require_template,
    takes_chats,
)
from omlx_producer.errors import InvalidRequest, ModelNotFound, one_line, shown
from omlx_producer.terminal import counted
from omlx_producer.wire import (
    CHAT_URL,
    COMPLETION_URL,
    EMBEDDINGS_URL,
    RESPONSES_URL,
    GenerationRequest,
    ModelInfo,
    PictureUrl,
    chat_fields,
    text_fields,
)
from omlx_producer.wire.json_limits import read_json
from omlx_producer.wire.openai_fields import REFUSED, ignored_fields

DEFAULT_TEMPLATE = "{prompt}"
_FIELD_OF_URL = {
    CHAT_URL: "messages",
    COMPLETION_URL: "prompt",
    RESPONSES_URL: "input",
    EMBEDDINGS_URL: "input",
}
# What an object without a prompt or messages has that is meant as a Batch line.
_BATCH_FIELDS = frozenset({"method", "url", "body"})
# Columns of the custom_id, unless --id-field names another.
ID_COLUMNS = ("custom_id", "id")
MAX_ID_CHARACTERS = 512
MESSAGES, PROMPT = "messages", "prompt"
# Fields that count in a row with messages of its own, or that are refused there by name.
REQUEST_FIELDS = frozenset(GenerationRequest.model_fields) | REFUSED.keys() | {"max_tokens"}
Empty = Literal["skip", "fail", "run"]
EMPTY: tuple[Empty, ...] = get_args(Empty)
# A column that none of the first rows has is a mistake in the options.
FIRST_ROWS = 100
# Of Parquet with its pictures, since the first rows are held together.
FIRST_PICTURES = 8


class Shape(BaseModel):
    """The options that say how records become requests.

    Attributes:
        template: without one, an object of JSONL must be an OpenAI Batch line or have a prompt, and
            any row may have messages of its own.
        image: the column of pictures. A folder has `PATH`.
        id_field: by default ``custom_id``, else ``id``, else the row has its number; in a folder
            its path.
        sampling: fields of the request, for rows that do not set them.
        embed: whether vectors of the texts are wanted.
        empty: what becomes of rows with an empty field of the template. By default the run is
            refused; where rows can be read only once, rows after the first hundred fail.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str | None = Field(
        default=None, description='Make prompts, as in "Summarise: {text}".'
    )
    image: str | None = Field(default=None, description="Column of pictures, as paths or bytes.")
    id_field: str | None = Field(default=None, description="Column of ids; else custom_id or id.")
    empty: Empty | None = Field(default=None, description="What becomes of rows with empty fields.")
    model: str | None = Field(default=None, description="Run all rows on this, whatever they name.")
    raw: bool = Field(
        default=False, description="Send texts as bare prompts, not as user messages."
    )
    system: str | None = Field(default=None, description="A system message before each.")
    embed: bool = False
    sampling: Mapping[str, Any] = {}


class Template:
    """A prompt with fields in braces, as in ``Summarise: {text}``. ``{{`` and ``}}`` are braces.

    Unlike `str.format` it reads no attributes or items of values, so no template can run code.

    Args:
        alike: whether prompts may be alike, as pictures tell the rows apart.

    Raises:
        InvalidRequest: if braces do not match, or a field is more than a name.

    Attributes:
        columns: the names of its fields.
    """

    def __init__(self, text: str, *, alike: bool = False) -> None:
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidRequest(
                "template",
                f"got {text!r} ({error})",
                "write {field} for a field and {{ or }} for a brace",
            ) from None
        for _, name, spec, conversion in parts:
            if name is not None and (spec or conversion or not name):
                raise InvalidRequest(
                    "template",
                    f"got the field {{{name}...}}",
                    "give a name alone, and write {{ or }} for a brace",
                )
        self._parts = [(literal, name) for literal, name, _, _ in parts]
        self.columns = [name for _, name in self._parts if name is not None]
        if not self.columns and not alike:
            raise InvalidRequest(
                "template",
                f"got {text!r}, and all prompts would be alike",
                'name a field, as in "Summarise: {text}"',
            )

    def empty(self, values: Mapping[str, Any]) -> list[str]:
        """Its fields for which a row has nothing but blanks."""
        return [name for name in dict.fromkeys(self.columns) if _is_blank(values.get(name))]

    def render(self, values: Mapping[str, Any], *, with_empty: bool = False) -> str:
        """The prompt of one row.

        Args:
            with_empty: also if fields are empty.

        Raises:
            InvalidRequest: if a field is empty.
        """
        if not with_empty:
            self._require_filled(values)
        return "".join(
            literal + (_as_text(values.get(name)) if name is not None else "")
            for literal, name in self._parts
        )

    def _require_filled(self, values: Mapping[str, Any]) -> None:
        for name in self.empty(values):
            if values.get(name) is not None:
                raise InvalidRequest(name, "empty", "the template needs it, so fill it in")
            present = [other for other, value in values.items() if value is not None]
            raise InvalidRequest(
                name,
                "the template needs it and the row has none",
                f"the row has {', '.join(present) or 'nothing'}",
            )


def _is_blank(value: Any) -> bool:
    """Whether a value is none, as pandas' NaN, or has blanks alone."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _as_text(value: Any) -> str:
    """A value as a prompt has it."""
    if _is_blank(value):
        return value if isinstance(value, str) else ""
    if isinstance(value, str | datetime.date | datetime.time):
        return str(value)
    return json.dumps(value, default=str, ensure_ascii=False)


class RowMaker:
    """Makes rows of records.

    Args:
        models: the known models, by alias.
        folder: to which the paths of pictures are relative.
        require_known_model: False also takes models that no worker has announced.
        default_model: of rows that name none; else the only known one.

    Attributes:
        ignored: how many rows had a field of OpenAI that has no effect, by field.
        used: the models of the rows.
        skipped: how many rows were left out.
        to_skip: how many will be, as far as they were counted before.
        constraint: of the options, for rows without one of their own.

    Raises:
        InvalidRequest: if the shape does not suit the format, the template is invalid, no request
            can have these options, or no row a known model.
    """

    def __init__(
        self,
        kind: Format,
        shape: Shape,
        models: Mapping[str, ModelInfo],
        *,
        folder: Path = Path(),
        require_known_model: bool = True,
        default_model: str | None = None,
    ) -> None:
        if require_known_model and shape.model is not None:
            require_known(GenerationRequest.parse({"model": shape.model, "prompt": "x"}), models)
        elif require_known_model and not models:
            missing = ModelNotFound(
                None,
                "no worker has announced a model yet",
                "start one with omlx-worker run -m MODEL",
            )
            missing.anyway = True
            raise missing
        self._kind = kind
        self._shape = shape
        self._folder = folder
        self._image = PATH if kind == "pictures" else shape.image
        self._models = models
        self._default_model = default_model
        self._require_known = require_known_model
        if kind == "text":
            self._require_no_columns("a text input has no columns", "give the format csv")
        self._batch_lines = kind == "jsonl" and shape.template is None
        if self._image is not None:
            self._require_chats_about_pictures()
        template = DEFAULT_TEMPLATE if shape.template is None else shape.template
        self._template = Template(template, alike=self._image is not None)
        # What was known before this run's own worker may be of an older one, without pictures.
        picture = PictureUrl("png", b"x") if self._image and require_known_model else None
        fields = self._text_fields("x", chat=not shape.raw, picture=picture) | {"model": "x"}
        # Batch lines may ask for log-probabilities themselves.
        if self._batch_lines and "top_logprobs" in shape.sampling:
            fields["logprobs"] = True
        asked = GenerationRequest.parse({**fields, **shape.sampling})
        require_compilable(asked)
        if (alias := shape.model or default_model) and not self._batch_lines:
            require_served(asked.model_copy(update={"model": alias}), models)
        self.constraint = asked.constraint
        self.ignored: Counter[str] = Counter()
        self.used: set[str] = set()
        self.skipped = self.to_skip = 0

    def checked(
        self, records: Iterable[Record], again: Iterable[Record] | None = None
    ) -> Iterator[Record]:
        """The records to run, after a look at the first for what would fail all rows alike.

        Args:
            again: all records once more, to look for open quotes and to count those with empty
                fields of a template; without them the first are counted.

        Raises:
            InvalidRequest: at once, if none of the first rows can be read, has a column that the
                options name, or a model; if a quote takes rows; or if a field is empty and nothing
                says what to do then.
        """
        records = iter(records)
        heavy = self._kind == "parquet" and self._image is not None
        first = list(itertools.islice(records, FIRST_PICTURES if heavy else FIRST_ROWS))
        if first and all(record.problem for record in first):
            told = f"line {first[0].line}: {first[0].problem}"
            raise InvalidRequest(None, told, first[0].remedy)
        values = [record.value for record in first if isinstance(record.value, dict)]
        if values:
            self._require_columns({column: None for value in values for column in value})
        elif any(isinstance(record.value, str) for record in first):
            self._require_no_columns("texts have no columns", "give objects")
        if first and self._shape.model is None and not any(map(self._names_model, first)):
            self._only_model()
        if self._shape.empty in (None, "skip") or self._kind == "csv":
            self._refuse_lost(first if again is None else again)
        return filter(self._keeps, _each(first, records))

    def _names_model(self, record: Record) -> bool:
        value = record.value
        if not self._batch_lines or not isinstance(value, dict):
            return False
        body = value.get("body", value)
        if not isinstance(body, dict):
            return False
        return body.get("model") is not None or value.get("url") == EMBEDDINGS_URL

    def _refuse_lost(self, records: Iterable[Record]) -> None:
        empty, line = Counter[str](), 0
        for record in records:
            if record.takes:
                raise InvalidRequest(None, f"line {record.line}: {record.problem}")
            names = self._empty_fields(record)
            empty.update(names)
            self.to_skip += bool(names) and self._shape.empty == "skip"
            line = line or (record.line if names else 0)
        if empty and self._shape.empty is None:
            found = " and ".join(
                f"{counted(rows, 'row')} {'has' if rows == 1 else 'have'} an empty {{{name}}}"
                for name, rows in empty.items()
            )
            raise InvalidRequest(
                "empty",
                f"missing, and {found}, first in line {line}",
                f"give {', '.join(EMPTY[:-1])} or {EMPTY[-1]}",
            )

    def _keeps(self, record: Record) -> bool:
        skip = self._shape.empty == "skip" and bool(self._empty_fields(record))
        self.skipped += skip
        return not skip

    def _empty_fields(self, record: Record) -> list[str]:
        """The fields of the template that a record leaves empty, if it goes by the template."""
        values = record.value
        if record.problem or not isinstance(values, dict) or self._has_messages(values):
            return []
        if self._is_batch_line(values):
            return []
        empty = self._template.empty(values)
        if self._image is not None and _is_blank(values.get(self._image)):
            empty.append(self._image)
        return empty

    def _require_columns(self, columns: Mapping[str, None]) -> None:
        shape, known = self._shape, ", ".join(columns)
        for option in ("id_field", "image"):
            named = getattr(shape, option)
            if named is not None and named not in columns:
                raise InvalidRequest(
                    option, f"got {named!r}, a column that the input lacks", f"it has {known}"
                )
        if self._batch_lines and "body" in columns:
            self._require_no_options_of_texts()
        if shape.template is None and MESSAGES in columns:
            return
        if self._batch_lines:
            if "body" not in columns and PROMPT not in columns:
                raise InvalidRequest(
                    None,
                    f"the input holds no OpenAI Batch lines: it has {known}, not body, messages or "
                    "prompt",
                    "for objects of your own give a template",
                )
            return
        for column in self._template.columns:
            if column not in columns:
                given = "missing" if shape.template is None else f"got {shape.template!r:.80}"
                raise InvalidRequest(
                    "template",
                    f"{given}, but the input lacks the column {column}",
                    f"it has {known}",
                )

    def _require_no_columns(self, got: str, instead: str) -> None:
        for option in ("template", "id_field", "image"):
            if getattr(self._shape, option) is not None:
                raise InvalidRequest(option, got, f"leave it out, or {instead}")

    def _require_no_options_of_texts(self) -> None:
        for option in ("raw", "system", "image"):
            if getattr(self._shape, option) not in (None, False):
                raise InvalidRequest(
                    option,
                    "OpenAI Batch lines have their own messages or prompts",
                    "leave it out, or give a template for other objects",
                )

    def _require_chats_about_pictures(self) -> None:
        shape = self._shape
        if shape.embed:
            raise InvalidRequest(None, "vectors are of texts, not of pictures", "use run")
        if shape.raw:
            raise InvalidRequest("raw", "pictures go into chats", "leave it out")
        if self._kind == "pictures" and shape.image is not None:
            raise InvalidRequest("image", "the input is pictures alone", "leave it out")
        if self._kind == "pictures" and shape.template is None:
            raise InvalidRequest(
                "template", "missing", 'say what to do with each picture, as in "Describe it."'
            )

    def make(self, record: Record) -> Row | BadRow:
        """The row of a record; a `BadRow` if it has no valid request."""
        try:
            return self._make(record)
        except RecursionError:
            empty = Record(record.line, None)
            return _bad(empty, None, "unparsable", "nested too deeply", own_id=False)

    def _make(self, record: Record) -> Row | BadRow:
        if record.problem:
            return self._unread(record)
        custom_id = None
        try:
            custom_id = self._custom_id(record)
            fields, columns, picture = self._fields(record)
            request = self._check(fields, columns)
        except InvalidRequest as error:
            code = "unparsable" if custom_id is None else "invalid_request"
            if isinstance(error, ModelNotFound):
                code = NO_MODEL
            reason, own_id = error.told(error.field), custom_id is not None
            bad = _bad(record, custom_id, code, reason, own_id=own_id)
            return replace(bad, field=error.field or "")
        self.used.add(request.model)
        digest = digest_of(custom_id, request.to_wire())
        return Row(custom_id, record.line, request, digest, columns, picture)

    def _unread(self, record: Record) -> BadRow:
        """The row of a record with a problem, under its id if that could be read."""
        custom_id = None
        if record.value is not None:
            with contextlib.suppress(InvalidRequest):
                custom_id = self._custom_id(record)
        return _bad(record, custom_id, "unparsable", record.problem, own_id=custom_id is not None)

    def _custom_id(self, record: Record) -> str:
        default = default_id(record.line)
        if isinstance(record.value, str):
            return default
        values, name = record.value or {}, self._shape.id_field
        if self._kind == "pictures":
            name = name or PATH
        batch_line = self._is_batch_line(values)
        if name is None and batch_line and _BATCH_FIELDS & values.keys():
            name = "custom_id"
        if name is None:
            name = next((name for name in ID_COLUMNS if values.get(name) is not None), None)
            if name is None:
                return default
        given = path_of(values.get(name))
        if isinstance(given, int) and not isinstance(given, bool) and not batch_line:
            given = str(given)
        if not isinstance(given, str) or not 1 <= len(given) <= MAX_ID_CHARACTERS:
            raise InvalidRequest(
                name, _found(values, name), f"give text of 1 to {MAX_ID_CHARACTERS} characters"
            )
        if any("\ud800" <= character <= "\udfff" for character in given):
            raise InvalidRequest(
                name,
                f"got {given!r:.80}",
                "give text without lone surrogates, which are no characters",
            )
        return given

    def _fields(self, record: Record) -> tuple[dict[str, Any], str, str]:
        """The fields of a request, the columns of the text that was made of the record, and what
        a sentence calls its picture."""
        shape, values = self._shape, record.value
        model, columns, picture = shape.model, "", ""
        if isinstance(values, dict) and self._has_messages(values):
            if self._image is not None:
                raise InvalidRequest(
                    MESSAGES, "given beside a picture", "write it in them, or give a template"
                )
            fields = self._own_request(values)
        elif isinstance(values, dict) and self._is_batch_line(values):
            self._require_no_options_of_texts()
            fields = _batch_body(values)
        else:
            own = self._own_fields(values) if isinstance(values, dict) else {}
            model = model or own.get("model") or self._only_model()
            if shape.embed:
                # The other fields are about generated text.
                own = {PROMPT: own[PROMPT]} if PROMPT in own else {}
            if not isinstance(own.get(PROMPT, ""), str):
                if self._image is not None:
                    raise InvalidRequest(PROMPT, "got tokens beside a picture", "give text")
                fields = own
            else:
                own.pop(PROMPT, None)
                if isinstance(values, str):
                    columns, text = PROMPT, values
                else:
                    columns = ", ".join(dict.fromkeys(self._template.columns))
                    text = self._prompt(values or {})
                if not text:
                    raise InvalidRequest(columns, "empty", "give text")
                shown, picture = self._picture(values)
                fields = own | self._text_fields(text, chat=self._chats(model), picture=shown)
        self.ignored.update(ignored_fields(fields))
        for name, value in shape.sampling.items():
            names = (name, "max_tokens") if name == "max_completion_tokens" else (name,)
            if all(fields.get(given) is None for given in names):
                fields[name] = value
        # Nobody reads the tokens of a row; publishing them would only cost.
        fields.pop("stream", None)
        if model is not None:
            fields["model"] = model
        elif fields.get("model") is None and fields.get("input") is not None:
            fields["model"] = only_model(self._models, vectors=True)
        elif fields.get("model") is None:
            fields["model"] = self._only_model()
        return fields, columns, picture

    def _picture(self, values: Any) -> tuple[PictureUrl | None, str]:
        """The picture of a record, and what a sentence calls it; None without one.

        Raises:
            InvalidRequest: see `read_picture`; or if the record must have one and does not.
        """
        name = self._image
        if name is None or not isinstance(values, dict):
            return None, ""
        value = values.get(name)
        if _is_blank(value):
            if self._shape.empty == "run":
                return None, ""
            raise InvalidRequest(name, "empty", "give the path of a picture")
        try:
            picture, told = read_picture(value, self._folder)
        except InvalidRequest as error:
            error.field = name
            raise
        return picture, f"{name}: {told:.200}"

    def _text_fields(
        self, text: str, *, chat: bool, picture: PictureUrl | None = None
    ) -> dict[str, Any]:
        """The fields of a request for a text that was made of a record."""
        if self._shape.embed:
            return {"input": text}
        content = text if picture is None else with_picture(text, picture)
        return text_fields(content, chat=chat, system=self._shape.system)

    def _prompt(self, values: Mapping[str, Any]) -> str:
        return self._template.render(values, with_empty=self._shape.empty == "run")

    def _has_messages(self, values: Mapping[str, Any]) -> bool:
        """Whether a row has messages of its own to run."""
        own = values.get(MESSAGES) is not None and "body" not in values
        return own and self._shape.template is None

    def _is_batch_line(self, values: Mapping[str, Any]) -> bool:
        """Whether a row must be a line of OpenAI's Batch form."""
        own = values.get(PROMPT) is not None and "body" not in values
        return self._batch_lines and not own and not self._has_messages(values)

    def _own_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a request that a row of JSONL has itself, if there is no template."""
        if not self._batch_lines:
            return {}
        return {name: value for name, value in values.items() if name in REQUEST_FIELDS}

    def _own_request(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The request of a row with messages of its own. In JSONL other fields count too."""
        fields = {MESSAGES: values[MESSAGES]} | self._own_fields(values)
        if self._kind != "jsonl" and isinstance(fields[MESSAGES], str):
            try:
                fields[MESSAGES] = read_json(fields[MESSAGES])
            except InvalidRequest:
                raise
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(
                    MESSAGES, f"not JSON ({error})", "give a list of messages"
                ) from None
        messages, system = fields[MESSAGES], self._shape.system
        if system and isinstance(messages, list) and messages and not _has_system(messages[0]):
            fields[MESSAGES] = [{"role": "system", "content": system}, *messages]
        return fields

    def _only_model(self) -> str:
        return self._default_model or only_model(self._models, vectors=self._shape.embed)

    def _chats(self, model: str) -> bool:
        """Whether a text goes to a model as a message."""
        shape = self._shape
        needed = shape.system is not None or "tools" in shape.sampling or self._image is not None
        return not shape.raw and (needed or takes_chats(self._models, model))

    def _check(self, fields: dict[str, Any], columns: str) -> GenerationRequest:
        try:
            request = GenerationRequest.parse(fields)
            require_served(request, self._models)
            require_fit(request, self._models)
        except InvalidRequest as error:
            error.field = named_field(error.field, columns, self._image) or error.field
            raise
        if self._require_known:
            require_known(request, self._models)
        require_template(request, self._models)
        return request


def _each(first: list[Record], others: Iterator[Record]) -> Iterator[Record]:
    """All records. The first ones, which may hold pictures, are dropped one by one."""
    first.reverse()
    while first:
        yield first.pop()
    yield from others


def _has_system(first: Any) -> bool:
    return isinstance(first, dict) and first.get("role") == "system"


def _batch_body(line: dict[str, Any]) -> dict[str, Any]:
    """The body of an OpenAI Batch line."""
    if not _BATCH_FIELDS & line.keys():
        raise InvalidRequest(PROMPT, "missing", "give a prompt, or messages")
    url, body = line.get("url"), line.get("body")
    if line.get("method", "POST") != "POST":
        raise InvalidRequest("method", f"got {line['method']!r:.80}", "give 'POST'")
    if not isinstance(url, str) or url not in _FIELD_OF_URL:
        raise InvalidRequest("url", _found(line, "url"), f"give {' or '.join(_FIELD_OF_URL)}")
    if not isinstance(body, dict):
        raise InvalidRequest("body", _found(line, "body"), "give a JSON object")
    wanted = _FIELD_OF_URL[url]
    if wanted not in body:
        raise InvalidRequest(f"body.{wanted}", "missing", f"{url} needs it")
    return chat_fields(body) if url == RESPONSES_URL else dict(body)


def _found(fields: Mapping[str, Any], name: str) -> str:
    """What a sentence says of a field that is wrong."""
    return f"got {shown(fields[name])}" if name in fields else "missing"


def _bad(record: Record, custom_id: str | None, code: str, reason: str, *, own_id: bool) -> BadRow:
    content = [record.value, reason] if own_id else [record.line, record.value, reason]
    digest = digest_of(custom_id, content)
    reason = one_line(f"{place_of(record.line, custom_id)}: {reason}")
    return BadRow(record.line, custom_id, code, reason, digest, own_id)
