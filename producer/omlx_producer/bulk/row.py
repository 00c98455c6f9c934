"""A row of a bulk run, its result, and the output line that holds it.

Output lines are those of OpenAI's Batch API. The ``id`` of a line ends in the digest of its row.
The error of a row without a custom_id of its own has its ``line`` instead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from omlx_producer.wire import GenerationRequest
from omlx_producer.wire.answer import as_completion
from omlx_producer.wire.end import STATES

DIGEST_CHARACTERS = 24
TOKEN_CHARACTERS = 4
"""The length of a token in a text whose tokens were not counted."""

ID_PREFIX = "batch_req_"
LINE_KEY = "line:"
"""The prefix of the keys of rows that are known by their line."""
REFUSED = frozenset(code for code, state in STATES.items() if state.refused)
"""The codes of rows that fail again unless the row or the model behind its alias changes."""
NO_MODEL = "model_not_found"
"""The code of rows whose model no worker has announced yet."""
CANCELLED = "cancelled"
"""The code of rows that were stopped."""
# OpenAI's own ids begin alike, but what follows has another length or is not hexadecimal.
_ID = re.compile(f"{ID_PREFIX}([0-9a-f]{{{DIGEST_CHARACTERS}}})")
# A field that holds a prompt.
_PROMPT = re.compile(r"messages(\[\d+\].*)?|prompt|input")
_PICTURE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.image_url")


@dataclass(frozen=True, slots=True)
class Row:
    """A valid row.

    Attributes:
        line: its line in the input, from 1; the row number where the input has no lines.
        digest: of custom_id and request, so an edited row has another one.
        columns: of the input whose text is its prompt; empty if its request is its own.
        picture: what a sentence calls a picture that a column of the input names or holds.
        characters: of the prompt's texts.
        held: what it takes of a buffer: these, and the bytes of its pictures.
    """

    custom_id: str
    line: int
    request: GenerationRequest
    digest: str
    columns: str = ""
    picture: str = ""
    characters: int = dataclasses.field(init=False)
    held: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        characters = sum(message.characters for message in self.request.messages or ())
        for text in self.request.texts:
            characters += len(text) * (1 if isinstance(text, str) else TOKEN_CHARACTERS)
        object.__setattr__(self, "characters", characters)
        pictures = self.request.pictures.values()
        object.__setattr__(self, "held", characters + sum(map(len, pictures)))

    @property
    def key(self) -> str:
        """Identifies the row. Of two output lines with the same key, the later one counts."""
        return id_key(self.custom_id)

    @property
    def most_tokens(self) -> int:
        """The most that it writes, all choices together."""
        return self.request.most_tokens * self.request.n

    @property
    def work(self) -> int:
        """A rough count of the tokens that it reads and writes."""
        return self.characters // TOKEN_CHARACTERS + self.most_tokens


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot run, and why.

    Attributes:
        code: one of `REFUSED`, or `NO_MODEL`.
        own_id: whether no other row has its custom_id; otherwise its line identifies it.
        field: that is wrong; "" if it is none.
    """

    line: int
    custom_id: str | None
    code: str
    reason: str
    digest: str
    own_id: bool
    field: str = ""

    @property
    def key(self) -> str:
        if self.own_id and self.custom_id is not None:
            return id_key(self.custom_id)
        return line_key(self.line)


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of a detached batch, as its job names it.

    Attributes:
        run: the batch, without ``batch-``.
        row: its name in the batch, a number from 1.
    """

    run: str
    row: str
    digest: str
    custom_id: str

    @property
    def key(self) -> str:
        return id_key(self.custom_id)

    @classmethod
    def of_field(cls, text: bytes) -> BatchRow | None:
        """Read the job's field; None if it is not one of a batch's row: anybody can write it."""
        try:
            run, name, digest, _, custom_id = text.decode().split(" ", 4)
            row = cls(run, name, digest, json.loads(custom_id))
        except ValueError:
            return None
        return row if isinstance(row.custom_id, str) else None


@dataclass(frozen=True, slots=True)
class RowResult:
    """The end of a row: an OpenAI response body, or a code and a sentence.

    Attributes:
        field: that is refused; "" if it is none.
        written: its output line as a worker wrote it; empty if none did.
        usage: what its response counts; nothing of one that failed.
    """

    row: Row | BadRow | BatchRow
    job_id: str
    body: dict[str, Any] | None = None
    code: str = ""
    reason: str = ""
    field: str = ""
    written: bytes = b""
    usage: RowUsage = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        usage = RowUsage() if self.body is None else RowUsage.of(self.body)
        object.__setattr__(self, "usage", usage)

    @classmethod
    def of_bad(cls, row: BadRow) -> RowResult:
        """The result of a row that has no job."""
        return cls(row, "", code=row.code, reason=row.reason, field=row.field)

    @classmethod
    def of_line(cls, row: Row, line: bytes) -> RowResult:
        """The result of a row, from the output line that a worker has written."""
        document = json.loads(line)
        error, response = document["error"], document["response"]
        if error is None:
            return cls(row, response["request_id"], body=response["body"], written=line)
        field, reason = error.get("param", ""), error["message"]
        if named := named_field(field, row.columns, row.picture):
            reason, line = named + reason.removeprefix(field), b""
        job, code = ID_PREFIX + row.digest, error["code"]
        return cls(row, job, code=code, reason=reason, field=field, written=line)

    @property
    def ok(self) -> bool:
        return self.body is not None

    @property
    def line(self) -> int:
        """The line of its row in the input; 0 of a detached batch."""
        return 0 if isinstance(self.row, BatchRow) else self.row.line


@dataclass(frozen=True, slots=True)
class RowUsage:
    """What the response of a row counts.

    Attributes:
        cached_tokens: those of ``prompt_tokens`` that were not read.
        cut_by_length: 1 if one of its choices ended at the limit of tokens.
        cut_by_repetition: 1 if one ended because it repeated itself.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cut_by_length: int = 0
    cut_by_repetition: int = 0

    @classmethod
    def of(cls, result: dict[str, Any]) -> RowUsage:
        """Those of a response body; 0 for a figure that it lacks."""
        body = as_completion(result)
        usage = body.get("usage") or {}
        speculation = usage.get("speculation") or {}
        tokens = usage.get("completion_tokens", 0)
        ends = {choice.get("finish_reason") for choice in body.get("choices", ())}
        return cls(
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            tokens,
            speculation.get("drafted", 0),
            sum(speculation.get("accepted", ())),
            # A prompt that was only scored is no text that was cut.
            int(tokens > 0 and "length" in ends),
            int("repetition" in ends),
        )


class WrittenLine(NamedTuple):
    """What an output line says about its row."""

    digest: str
    ok: bool


def id_key(custom_id: str) -> str:
    return f"id:{custom_id}"


def line_key(line: int) -> str:
    return f"{LINE_KEY}{line}"


def default_id(line: int) -> str:
    """The custom_id of a row that has none."""
    return f"row-{line}"


def place_of(line: int, custom_id: str | None) -> str:
    """What a sentence calls a row: its line, and the id that it has itself."""
    own = custom_id not in (None, default_id(line))
    return f"line {line}, id {custom_id!r:.80}" if own else f"line {line}"


def named_field(field: str | None, columns: str, picture: str | None) -> str | None:
    """What an input calls a field of a request that was made of it; empty of others.

    Args:
        columns: of the text that was made a prompt.
        picture: what the picture is called.
    """
    if picture and _PICTURE.match(field or ""):
        return picture
    return columns if _PROMPT.fullmatch(field or "") else ""


def digest_of(custom_id: str | None, content: Any) -> str:
    """A fingerprint of a row: 96 bits, in hexadecimal."""
    text = json.dumps([custom_id, content], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def as_document(result: RowResult) -> dict[str, Any]:
    """What the output line of a result holds."""
    row = result.row
    document: dict[str, Any] = {
        "id": ID_PREFIX + row.digest,
        "custom_id": row.custom_id,
        "response": None,
        "error": None,
    }
    if result.ok:
        document["response"] = {
            "status_code": 200,
            "request_id": result.job_id,
            "body": result.body,
        }
    else:
        error: dict[str, Any] = {"code": result.code, "message": result.reason}
        if result.field:
            error["param"] = result.field
        if isinstance(row, BadRow) and not row.own_id:
            error["line"] = row.line
        document["error"] = error
    return document


def write_line(result: RowResult) -> bytes:
    """The output line of a result, with its line end."""
    if result.written:
        return result.written
    # A lone surrogate becomes JSON's own escape of it.
    return (
        json.dumps(as_document(result), ensure_ascii=False).encode(errors="backslashreplace")
        + b"\n"
    )


def read_line(line: bytes) -> WrittenLine | None:
    """Read an output line; None if `write_line` did not write it."""
    try:
        document = json.loads(line)
        line_id = _ID.fullmatch(document["id"])
        return line_id and WrittenLine(line_id[1], document["error"] is None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def job_of_line(line: bytes) -> str:
    """The job id of a result, from its output line; empty for an error."""
    return str((json.loads(line)["response"] or {}).get("request_id", ""))
