"""The demo's prompts: code to go on with, a file to copy, and JSON by a schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field, ValidationError


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a job.

    Attributes:
        kind: what its text is, in a few words; empty for code that goes on.
        fields: of its request, beside those that all jobs have.
    """

    text: str
    kind: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


class Release(BaseModel, extra="forbid"):
    """What the JSON of a constrained job describes."""

    version: str = Field(pattern=r"^[0-9]\.[0-9]\.[0-9]$")
    beta: bool


def is_release(text: str) -> bool:
    """Whether a text is JSON of a `Release`, whole."""
    try:
        Release.model_validate_json(text, strict=True)
    except ValidationError:
        return False
    return True


_FILE = """\
@dataclass
class Box:
    width: int
    height: int
    depth: int
    color: str = "white"

    def to_dict(self):
        return {
            "width": self.width,
            "height": self.height,
            "depth": self.depth,
            "color": self.color,
        }
"""
# The model follows no instruction, but it continues a copy.
_COPY_SO_FAR = """\
@dataclass
class Crate:
    width: int
    height: int
"""

COPY = Prompt(
    f"{_FILE}\n\n# The same file, with Box renamed to Crate:\n\n{_COPY_SO_FAR}",
    "copies its prompt",
    {"temperature": 0.0, "stop": "\n\n\n"},
)
CONSTRAINED = Prompt(
    "# A release, as JSON:\n",
    "JSON by a schema",
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "release", "schema": Release.model_json_schema()},
        }
    },
)
PROMPTS = (
    # First: later the worker may have learnt that the model's own drafts are as good.
    COPY,
    CONSTRAINED,
    Prompt("def fibonacci(n):\n"),
    Prompt("class Stack:\n    def __init__(self):\n"),
    Prompt("def read_lines(filename):\n    with open(filename) as f:\n"),
    Prompt("class Node:\n    def __init__(self, value):\n"),
    Prompt("def main():\n    parser = argparse.ArgumentParser(\n"),
    Prompt("for name, value in sorted(\n"),
)
