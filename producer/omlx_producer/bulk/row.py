"""A row of a bulk run, and what became of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from omlx_producer.protocol import DEFAULT_MAX_TOKENS, GenerationRequest

DIGEST_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """A valid row.

    Attributes:
        line: where it stands in the input, from 1; the row number where input has no lines.
        digest: follows from custom_id and request: an edited row has another one.
    """

    custom_id: str
    line: int
    request: GenerationRequest
    digest: str

    @property
    def key(self) -> str:
        """What makes two lines of output the same row's."""
        return id_key(self.custom_id)

    @property
    def characters(self) -> int:
        """Characters of the prompt; a token id counts as four."""
        prompt = self.request.prompt
        if isinstance(prompt, list):
            return 4 * len(prompt)
        return len(beginning_of(self.request)) if prompt is None else len(prompt)

    @property
    def work(self) -> int:
        """Roughly how many tokens it reads and writes."""
        limit = self.request.max_completion_tokens or DEFAULT_MAX_TOKENS
        return self.characters // 4 + limit * self.request.n


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can never run, and why.

    Attributes:
        code: one word for counting: ``unparsable``, ``duplicate_custom_id``, ``invalid_request``.
        own_id: whether the custom_id is this row's alone; otherwise its line identifies it.
    """

    line: int
    custom_id: str | None
    code: str
    reason: str
    digest: str
    own_id: bool

    @property
    def key(self) -> str:
        if self.own_id and self.custom_id is not None:
            return id_key(self.custom_id)
        return line_key(self.line)


@dataclass(frozen=True, slots=True)
class RowResult:
    """The end of a row: an OpenAI response body, or a code and a sentence."""

    row: Row | BadRow
    job_id: str
    body: dict[str, Any] | None = None
    code: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.body is not None


def id_key(custom_id: str) -> str:
    return f"id:{custom_id}"


def line_key(line: int) -> str:
    return f"line:{line}"


def digest_of(custom_id: str | None, content: Any) -> str:
    """A fingerprint of a row: 96 bits, in hexadecimal."""
    text = json.dumps([custom_id, content], sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARACTERS]


def beginning_of(request: GenerationRequest) -> str:
    """The text that the model reads first, all of it."""
    if isinstance(request.prompt, list):
        return " ".join(map(str, request.prompt))
    if request.prompt is not None:
        return request.prompt
    return "".join(message.text for message in request.messages or ())
