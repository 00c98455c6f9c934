"""The base of what users write in a request, and what all parts of it check alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.refusal import refusal_of
from omlx_producer.wire.remedy import Remedy

MAX_LEVELS = 100
"""Lists and objects inside each other in one field of a request, and in a result."""
MAX_PROMPT_CHARACTERS = 8_000_000


@dataclass(frozen=True, slots=True)
class Since:
    """Beside the type of a field that requests have, or take more in, since a later `WIRE_VERSION`.

    >>> TopA = Annotated[float | None, Since(2)]
    """

    version: int


class RequestPart(BaseModel):
    """The base of what users write. `omlx_producer.wire.remedy` has the words of its limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    shape: ClassVar[str] = "a JSON object"

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Validate a decoded JSON document or keyword arguments.

        Raises:
            InvalidRequest: names the field, the value and the remedy.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise refusal_of(error, cls, data, cls.shape) from None

    @property
    def wire_version(self) -> int:
        """The version of the latest field that is not at its default, here or in a part of it."""
        marks, versions = _marks(type(self)), [1]
        for name in self.model_fields_set:
            held = getattr(self, name)
            if name in marks and held != type(self).model_fields[name].default:
                versions.append(marks[name])
            parts = held if isinstance(held, list) else [held]
            # A list of parts holds nothing else, and one of tokens is long.
            if parts and isinstance(parts[0], RequestPart):
                versions += [part.wire_version for part in parts]
        return max(versions)


@cache
def _marks(part: type[RequestPart]) -> dict[str, int]:
    """The versions of a part's later fields."""
    return {
        name: each.version
        for name, field in part.model_fields.items()
        for each in field.metadata
        if isinstance(each, Since)
    }


# The constraint makes pydantic refuse lone surrogates, which no tokenizer and no UTF-8 can take.
Text = Annotated[str, Field(min_length=0)]
Name = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$"), Remedy("1 to 64 letters, digits, _ and -")
]


def json_text(name: str, value: Any) -> str:
    """A field's value as compact JSON.

    Raises:
        ValueError: if JSON or UTF-8 cannot hold it, or it is nested too deeply to be read back.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(name, f"cannot be sent as JSON ({error})", "change it") from None
    return text


def levels(value: Any) -> int:
    """How deep a value of JSON is nested: 0 for a number or a text, 1 for a list of them."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        inner, level = waiting.pop()
        if isinstance(inner, dict | list):
            deepest = max(deepest, level)
            held = inner.values() if isinstance(inner, dict) else inner
            waiting += [(item, level + 1) for item in held]
    return deepest
