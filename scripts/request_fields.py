"""Write what follows from the fields of a request: the keywords of `submit`, and their table.

>>> .venv/bin/python -m scripts.request_fields
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, JsonValue

from omlx_producer import GenerationRequest
from omlx_producer.client import fields
from omlx_producer.wire import request
from omlx_producer.wire.remedy import remedy_of

USAGE = Path(__file__).parents[1] / "docs" / "usage.md"
KEYWORDS = Path(fields.__file__)
HEADER = "| field | what it may be | what it does |\n| --- | --- | --- |\n"
# Only a translation from /v1/responses sets it.
LEFT_OUT = frozenset({"responses"})


def pages() -> list[tuple[Path, str]]:
    """The files, each as it should be."""
    usage, code = USAGE.read_text(), KEYWORDS.read_text()
    rows, lines = f"{re.escape(HEADER)}(\\|.*\n)*", '(?<="""\n\n)(    .*\n)+(?=\n\nclass _)'
    return [
        (USAGE, re.sub(rows, lambda _: HEADER + table(), usage)),
        (KEYWORDS, re.sub(lines, lambda _: keywords(), code)),
    ]


def table() -> str:
    """A row for each field."""
    rows = []
    for name, field in GenerationRequest.model_fields.items():
        if name not in LEFT_OUT:
            may_be = re.sub(r"{.*}", r"`\g<0>`", remedy_of(field))
            if not field.is_required() and field.default is not None:
                may_be += f"; else {str(field.default).lower()}"
            rows.append(f"| `{name}` | {may_be} | {field.description} |\n")
    return "".join(rows)


def keywords() -> str:
    """A line for each field: its type as users may write it, without limits, with dicts."""
    [made] = ast.parse(inspect.getsource(GenerationRequest)).body
    assert isinstance(made, ast.ClassDef)
    lines = []
    for line in made.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
            continue
        name = line.target.id
        if name not in GenerationRequest.model_fields or name in LEFT_OUT:
            continue
        kinds = list(dict.fromkeys(_written(line.annotation)))
        kinds += ["None"] if name == "model" else []
        if name == "max_completion_tokens":
            lines.append(f"    max_tokens: {' | '.join(kinds)}\n")
        lines.append(f"    {name}: {' | '.join(kinds)}\n")
    return "".join(lines)


def _written(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(None):
            return ["None"]
        case ast.BinOp(left, ast.BitOr(), right):
            kinds = _written(left) + _written(right)
            return sorted(kinds, key=lambda kind: kind == "None")
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([kind, *_])):
            return _written(kind)
        case ast.Subscript(ast.Name("list"), kind):
            return [f"list[{each}]" for each in _written(kind)]
        case ast.Subscript(ast.Name("dict"), ast.Tuple([key, value])):
            return [f"dict[{_written(key)[0]}, {_written(value)[0]}]"]
        case ast.Name(name):
            return _named(name, getattr(request, name, None) or getattr(builtins, name))
    raise TypeError(ast.unparse(node))


def _named(name: str, kind: Any) -> list[str]:
    if kind is JsonValue:
        return ["Any"]
    if get_origin(kind) is Annotated:
        return [get_args(kind)[0].__name__]
    parts = get_args(kind) or (kind,)
    models = any(isinstance(part, type) and issubclass(part, BaseModel) for part in parts)
    return [name, "dict[str, Any]"] if models else [name]


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
