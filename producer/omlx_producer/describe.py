"""Say what is wrong with a request in one sentence: the field, the value, the remedy."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60
_SHORT.maxlevel = 2


def describe(error: ValidationError, model: type[BaseModel], data: Any, whole: str) -> str:
    """The first problem of a validation error, as one sentence.

    What a field should hold is the ``description`` of that field in the model, so that every
    field must have one.

    Args:
        error: what validating ``data`` raised.
        model: the model that ``data`` was to become.
        data: the input, for the name by which it gives a field that has two.
        whole: what ``data`` as a whole should be.
    """
    problems = [(problem, _path(problem)) for problem in error.errors(include_url=False)]
    first = problems[0][1][:1]
    # A union reports every branch that failed; the deepest is the one the user meant.
    problem, path = max((p for p in problems if p[1][:1] == first), key=lambda p: len(p[1]))
    if problem["type"] == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if not path:
        return f"request: got {_SHORT.repr(problem['input'])}; give {whole}"
    owner, expected = _look_up(model, path)
    if path == ["max_completion_tokens"] and isinstance(data, dict) and "max_tokens" in data:
        path = ["max_tokens"]
    where = _spell(path)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(path[-1]), owner.model_fields, n=1)
        return f"{where}: unknown field; " + (f"did you mean {near[0]}?" if near else "remove it")
    if problem["type"] == "missing":
        return f"{where}: missing; give {expected}"
    return f"{where}: got {_SHORT.repr(problem['input'])}; give {expected}"


def _path(problem: ErrorDetails) -> list[int | str]:
    """The fields, keys and indices that lead to a problem, without the branches of unions."""
    return [part for part in problem["loc"] if not _is_branch(part)]


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in {"str", "constrained-str"})


def _look_up(model: type[BaseModel], path: list[int | str]) -> tuple[type[BaseModel], str]:
    """The innermost model along a path, and what the innermost known field should hold."""
    expected = ""
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        expected = field.description or ""
        model = next(_models_in(field.annotation), model)
    return model, expected


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _spell(path: list[int | str]) -> str:
    spelled = ""
    for part in path:
        if isinstance(part, int):
            spelled += f"[{part}]"
        else:
            name = part if part.isidentifier() and len(part) <= 60 else _SHORT.repr(part)
            spelled += f".{name}" if spelled else name
    return spelled
