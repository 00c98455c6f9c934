"""What is wrong with a request, from the errors of its model."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from omlx_producer.errors import InvalidRequest, shown
from omlx_producer.terminal import counted
from omlx_producer.wire.remedy import remedy_of

LONGEST_PATH = 150

# The fields of requests that may be given under another name.
_OTHER_NAMES: dict[int | str, str] = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
# Options of the command line by the fields that they give.
_OF_OPTIONS = {
    "choice": "structured_outputs.choice",
    "end_loops": "repetition_detection",
    "regex": "structured_outputs.regex",
    "schema": "response_format",
}


def refusal_of(
    error: ValidationError, model: type[BaseModel], data: Any, whole: str
) -> InvalidRequest:
    """The first problem of a validation error.

    Args:
        error: raised while ``data`` was validated.
        data: the input; says which name it uses for a field that has two.
        whole: what ``data`` should be.
    """
    problems = [(problem, _path(problem)) for problem in error.errors(include_url=False)]
    first = problems[0][1][:1]
    # A union reports every branch that failed; the user meant the deepest.
    problem, path = max((p for p in problems if p[1][:1] == first), key=lambda p: len(p[1]))
    if problem["type"] == "value_error":
        own: InvalidRequest = problem["ctx"]["error"]
        where = ".".join(filter(None, (_spell(path), own.field)))
        return InvalidRequest(where, own.got, own.remedy)
    if not path:
        return InvalidRequest("request", f"got {shown(problem['input'])}", f"give {whole}")
    names, expected = _look_up(model, path)
    other = _OTHER_NAMES.get(path[0]) if len(path) == 1 else None
    where = other if other and data.get(path[0]) is None else _spell(path)
    if problem["type"] == "extra_forbidden":
        near = path[-1] not in names and difflib.get_close_matches(str(path[-1]), names, n=1)
        remedy = f"did you mean {near[0]}?" if near else "remove it"
        if len(path) == 1 and path[0] in _OF_OPTIONS:
            remedy = f"give {_OF_OPTIONS[path[0]]}"
        return InvalidRequest(where, "unknown field", remedy)
    if problem["type"] == "missing":
        return InvalidRequest(where, "missing", f"give {expected}")
    if problem["type"] == "string_unicode":
        expected = "text without lone surrogates, which are no characters"
    found = shown(problem["input"])
    if problem["type"] == "string_too_long":
        found = counted(len(problem["input"]), "character")
    return InvalidRequest(where, f"got {found}", f"give {expected}")


def _path(problem: ErrorDetails) -> list[int | str]:
    """The path to a problem: fields, keys and indices, without the branches of unions."""
    return [part for part in problem["loc"] if not _is_branch(part)]


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        "[" in part or part in {"str", "constrained-str", "ToolChoice"}
    )


def _look_up(model: type[BaseModel], path: list[int | str]) -> tuple[list[str], str]:
    """The fields where a path leads, and the remedy of the innermost known one along it."""
    models, expected = [model], ""
    for part in path:
        named = [(f.alias or n, f) for each in models for n, f in each.model_fields.items()]
        field = next((field for name, field in named if name == part), None)
        if field is None:
            continue
        expected = remedy_of(field)
        models = list(_models_in(field.annotation)) or models
    return [name for each in models for name in each.model_fields], expected


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
            name = part if part.isidentifier() and len(part) <= 60 else shown(part)
            spelled += f".{name}" if spelled else name
    return spelled if len(spelled) <= LONGEST_PATH else spelled[:LONGEST_PATH] + "..."
