"""The constraint of a generated text, as producers and engines name it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must match.

    Attributes:
        value: by kind: a JSON schema as JSON text, a regular expression, choices as a JSON list of
            texts, a Lark grammar of llguidance, or "" for any JSON object.
        begin_after: the text after which the constraint begins, such as ``</think>``; "" for at
            once.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    begin_after: str = ""
