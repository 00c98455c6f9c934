"""What an answer must match and what it may call, as command line options."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from omlx_producer.cli.sections import option
from omlx_producer.wire.structure import NamedSchema

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRAPPER = {field.alias or name for name, field in NamedSchema.model_fields.items()}
_CONSTRAINTS = ("regex", "choice")


def _document(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{path} is not JSON ({error})") from None
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror})") from None


def _response_format(
    _context: click.Context, _parameter: click.Parameter, path: Path | None
) -> dict[str, Any] | None:
    if path is None:
        return None
    schema = _document(path)
    if not isinstance(schema, dict):
        raise click.BadParameter(f"{path} holds no object; give a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "answer"} | _named(schema)}


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """A schema with its name, also of one that comes in OpenAI's wrappers.

    A schema of JSON that has only the wrapper's keys would allow everything.
    """
    if given.get("type") == "json_schema" and isinstance(given.get("json_schema"), dict):
        given = given["json_schema"]
    if "schema" in given and given.keys() <= _WRAPPER:
        return given
    return {"schema": given}


def _tools(
    _context: click.Context, _parameter: click.Parameter, path: Path | None
) -> list[Any] | None:
    if path is None:
        return None
    tools = _document(path)
    if not isinstance(tools, list) or not tools:
        raise click.BadParameter(f"{path} holds no list; give a list of tools as OpenAI has them")
    return tools


def texts(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[str] | None:
    """The values of an option that may be repeated; None without any."""
    return list(values) or None


def json_schema_option(help: str, *, section: str) -> Callable[[_Command], _Command]:
    """An option for a file with a schema; its value is a ``response_format``."""
    return option(
        "--json-schema",
        "response_format",
        section=section,
        type=_FILE,
        callback=_response_format,
        help=help,
    )


def form_options() -> list[Callable[[Any], Any]]:
    """The options of the answer's form."""
    section = "Answer"
    return [
        json_schema_option("The answer is JSON that matches this schema.", section=section),
        option("--regex", section=section, help="The answer matches this regular expression."),
        option(
            "--choice",
            section=section,
            multiple=True,
            callback=texts,
            help="The answer is one of these; repeatable.",
        ),
        option(
            "--tools",
            section=section,
            type=_FILE,
            callback=_tools,
            help="A JSON list of functions that may be called.",
        ),
    ]


def with_structured_outputs(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request, with the constraints moved into ``structured_outputs``."""
    constraints = {name: fields[name] for name in _CONSTRAINTS if name in fields}
    rest = {name: value for name, value in fields.items() if name not in constraints}
    return rest | ({"structured_outputs": constraints} if constraints else {})
