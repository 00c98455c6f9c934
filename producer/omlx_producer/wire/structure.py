"""What an answer must match: OpenAI's response formats, and structured outputs as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.json_limits import read_json
from omlx_producer.wire.json_schema import MAX_CONSTRAINT_CHARACTERS, require_schema
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.request_part import Name, RequestPart, Text, json_text

_SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}'
_A_SCHEMA = Remedy(f"a JSON schema such as {_SCHEMA}")

ConstraintText = Annotated[str, Field(min_length=1, max_length=MAX_CONSTRAINT_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match.

    Attributes:
        value: by kind: a JSON schema as JSON text, a regular expression, choices as a JSON list of
            texts, a Lark grammar of llguidance, or "" for any JSON object.
        frame: a Lark grammar of the whole text, in which ``@answer`` is what must match; "" if that
            is all of the text.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    frame: str = ""


class NamedSchema(RequestPart):
    """A JSON schema in OpenAI's form. The answer matches it, ``strict`` or not."""

    name: Name
    schema_: Annotated[dict[str, Any], _A_SCHEMA] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        require_schema("schema", self.schema_)
        return self


class ResponseFormat(RequestPart):
    """The form of the answer: free text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[
        NamedSchema | None, Remedy(f'an object such as {{"name": "a", "schema": {_SCHEMA}}}')
    ] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            if self.json_schema is None:
                raise InvalidRequest(
                    "json_schema", "missing", "give it, as the type is json_schema"
                )
            raise InvalidRequest(
                "json_schema", f"given with the type {self.type}", 'give the type "json_schema"'
            )
        return self

    @property
    def constraint(self) -> Constraint | None:
        if self.json_schema is not None:
            return Constraint("json_schema", json_text("schema", self.json_schema.schema_))
        return Constraint("json_object") if self.type == "json_object" else None


class StructuredOutputs(RequestPart):
    """A constraint by one of four means, as vLLM names them."""

    json_: Annotated[dict[str, Any] | None, _A_SCHEMA] = Field(default=None, alias="json")
    regex: Annotated[
        ConstraintText | None,
        Remedy(f"a regular expression of 1 to {MAX_CONSTRAINT_CHARACTERS} characters"),
    ] = None
    choice: Annotated[
        Annotated[list[ConstraintText], Field(min_length=1, fail_fast=True)] | None,
        Remedy("a list of at least one text, none of them empty"),
    ] = None
    grammar: Annotated[
        ConstraintText | None,
        Remedy(f"a Lark grammar of llguidance of 1 to {MAX_CONSTRAINT_CHARACTERS} characters"),
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _read_schema(cls, data: Any) -> Any:
        """vLLM takes a schema as JSON text, too."""
        if isinstance(data, dict) and isinstance(data.get("json"), str):
            try:
                return data | {"json": read_json(data["json"])}
            except (ValueError, RecursionError):
                return data
        return data

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if len(self._given) != 1:
            got = " and ".join(self._given) or "none of them"
            raise InvalidRequest(
                None, f"got {got}", "give exactly one of json, regex, choice and grammar"
            )
        if self.json_ is not None:
            require_schema("json", self.json_)
        if sum(map(len, self.choice or ())) > MAX_CONSTRAINT_CHARACTERS:
            raise InvalidRequest(
                "choice",
                f"got more than {MAX_CONSTRAINT_CHARACTERS} characters",
                "give fewer or shorter texts",
            )
        return self

    @property
    def _given(self) -> list[str]:
        return list(self.model_dump(by_alias=True, exclude_none=True))

    @property
    def means(self) -> str:
        """The name of the field that is given."""
        return self._given[0]

    @property
    def constraint(self) -> Constraint:
        if self.json_ is not None:
            return Constraint("json_schema", json_text("json", self.json_))
        if self.choice is not None:
            return Constraint("choice", json_text("choice", self.choice))
        if self.regex is not None:
            return Constraint("regex", self.regex)
        return Constraint("grammar", self.grammar or "")
