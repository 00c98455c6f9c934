"""Options of several commands: the fields of a request, by their names, and the output."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from omlx_producer.bulk.options import RunOptions
from omlx_producer.errors import InvalidRequest
from omlx_producer.program import option
from omlx_producer.schemas import short_schema
from omlx_producer.wire import LOOPS, GenerationRequest, NamedSchema
from omlx_producer.wire.remedy import kinds_of, remedy_of

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRAPPER = {field.alias or name for name, field in NamedSchema.model_fields.items()}
_CONSTRAINTS = ("regex", "choice")

# In the title, because only the worker knows the other defaults.
_SAMPLING = "Sampling (defaults: the model's, else OpenAI's)"
_sampling = partial(option, section=_SAMPLING)
_SHORTER = {
    "model": "-m",
    "max_completion_tokens": "--max-tokens",
    "thinking_token_budget": "--thinking-budget",
    "n": "-n",
}
_METAVARS = {"model": "ALIAS", "image": "COLUMN", "each": "DIR"}
# Fields of scores and vectors, which no printed text shows; fields with an option elsewhere; and
# parallel_tool_calls, which has none.
_LEFT_OUT = frozenset(
    {
        *("prompt_logprobs", "echo", "parallel_tool_calls", "model", "prompt", "stream"),
        *("input", "dimensions", "encoding_format"),
    }
)


def output_option(
    help: str = "Results (.jsonl, .csv, .parquet); errors beside them.",
) -> Callable[[_Command], _Command]:
    """The option for the file of results."""
    path = click.Path(dir_okay=False, path_type=Path)
    return option("-o", "--output", section="Output", type=path, help=help)


def _biases(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, float] | None:
    biases: dict[str, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[token_id] = float(bias)
        except ValueError:
            raise click.BadParameter(f"got {value!r}; give ID=VALUE, as in 42=-100") from None
    return biases or None


def _field_option(
    name: str, field: FieldInfo, section: str = _SAMPLING, default: Any = None
) -> Callable[[_Command], _Command] | None:
    """The option of a field; None for a field that is neither texts, numbers nor a flag.

    Args:
        default: what the command gets without it.
    """
    flag, told = f"--{name.replace('_', '-')}", field.description
    kinds = [get_origin(kind) or kind for kind in kinds_of(field)]
    shown = default not in (None, False)
    made = partial(option, section=section, default=default)
    if bool in kinds:
        both = f"{flag}/--no-{flag[2:]}" if field.default else flag
        return made(both, name, is_flag=True, show_default=shown, help=told)
    if kinds == [str, list]:
        return _sampling(flag, multiple=True, callback=texts, help=f"{told} Repeatable.")
    if name == "logit_bias":
        return _sampling(
            flag, multiple=True, callback=_biases, metavar="ID=VALUE", help=f"{told} Repeatable."
        )
    if kinds == [Literal]:
        choice = click.Choice(get_args(kinds_of(field)[0]))
        return made(flag, name, type=choice, show_default=shown, help=told)
    if kinds in ([int], [float], [str]):
        names = [flag, *filter(None, [_SHORTER.get(name)])]
        remedy = "" if kinds == [str] else remedy_of(field)
        if remedy:
            told = f"{told}  [{remedy}]"
        if not shown and field.default is not None:
            told = f"{told}  [default: {field.default}]"
        metavar = _METAVARS.get(name)
        return made(
            *names,
            name,
            type=kinds[0],
            metavar=metavar,
            help=told,
            show_default=shown,
            remedy=remedy,
        )
    return None


def run_option(name: str, section: str) -> Callable[[_Command], _Command]:
    """The option of a run that has this name."""
    field = RunOptions.model_fields[name]
    default = None if field.is_required() else field.default
    made = _field_option(name, field, section, default)
    assert made is not None, name
    return made


def vector_option(command: _Command) -> _Command:
    """Add the option for the numbers of a vector."""
    field = GenerationRequest.model_fields["dimensions"]
    made = _field_option("dimensions", field, "Request")
    assert made is not None
    return made(command)


def run_options(section: str, *names: str) -> Callable[[_Command], _Command]:
    """Those of a section of the help."""

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            command = run_option(name, section)(command)
        return command

    return decorate


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read ({error.strerror})") from None


def _document(name: str | Path, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{name} is not JSON ({error})") from None


def _response_format(
    _context: click.Context, _parameter: click.Parameter, given: str | None
) -> dict[str, Any] | None:
    if given is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer"} | _named(_schema(given))}


def _schema(given: str) -> dict[str, Any]:
    """The schema of a file, of JSON, or of the short form."""
    if given.lstrip().startswith("{"):
        return _object("the schema", given)
    if given.endswith(".json") or _is_file(given):
        return _object(given, _read(Path(given)))
    try:
        return short_schema(given)
    except InvalidRequest as error:
        raise click.BadParameter(str(error)) from None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:
        return False


def _object(name: str, text: str | bytes) -> dict[str, Any]:
    schema = _document(name, text)
    if not isinstance(schema, dict):
        raise click.BadParameter(f"{name} holds no object; give a JSON schema")
    return schema


def _named(given: dict[str, Any]) -> dict[str, Any]:
    """A schema with its name, also of one that comes in OpenAI's wrappers.

    What has ``schema`` and only keys of the wrapper is one: as a JSON schema it allows anything.
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
    tools = _document(path, _read(path))
    if not isinstance(tools, list) or not tools:
        raise click.BadParameter(f"{path} holds no list; give a list of tools as OpenAI has them")
    return tools


def _loops(
    _context: click.Context, _parameter: click.Parameter, ends: bool | None
) -> dict[str, Any] | None:
    if ends is None:
        return None
    return LOOPS.model_dump(exclude_defaults=True) if ends else {"max_pattern_size": 0}


def texts(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[str] | None:
    """The values of an option that may be repeated; None without any."""
    return list(values) or None


def schema_option(help: str, *, section: str) -> Callable[[_Command], _Command]:
    """An option for a schema; its value is a ``response_format``."""
    return option(
        "--schema",
        "response_format",
        section=section,
        metavar="FILE|FIELDS",
        callback=_response_format,
        help=help,
    )


def choice_option(help: str, *, section: str) -> Callable[[_Command], _Command]:
    """An option for texts of which an answer is one."""
    return option("--choice", section=section, multiple=True, callback=texts, help=help)


def form_options() -> list[Callable[[Any], Any]]:
    """The options of the answer's form."""
    section = "Answer"
    return [
        schema_option(
            "The answer is JSON: of a file, or of fields: name, year int.", section=section
        ),
        option("--regex", section=section, help="The answer matches this regular expression."),
        choice_option("The answer is one of these; repeatable.", section=section),
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


def model_option(help: str) -> Callable[[_Command], _Command]:
    """The option for the model's alias."""
    return option("-m", "--model", section="Request", metavar="ALIAS", help=help)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field that one can hold, and those of the answer's form."""
    options = [
        made
        for name, field in GenerationRequest.model_fields.items()
        if name not in _LEFT_OUT and (made := _field_option(name, field))
    ]
    options.append(
        _sampling(
            "--end-loops/--no-end-loops",
            "repetition_detection",
            default=None,
            callback=_loops,
            help=f"End texts that loop {LOOPS.min_count} times and for {LOOPS.min_tokens} tokens.",
        )
    )
    for decorate in reversed([*options, *form_options()]):
        command = decorate(command)
    return command


def refuse_conflicts(raw: bool, system: str | None, sampling: Mapping[str, Any]) -> None:
    """Refuse two options of which a request has only one."""
    raws = {"--raw": raw or None}
    forms = {
        "--schema": sampling["response_format"],
        "--regex": sampling["regex"],
        "--choice": sampling["choice"],
    }
    for alone in (raws | {"--system": system}, raws | {"--tools": sampling["tools"]}, forms):
        if len(both := [name for name, value in alone.items() if value is not None]) > 1:
            raise click.UsageError(
                f"{both[1]} does not go with {both[0]}; leave one of the two out"
            )


def given(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for the options that the user gave."""
    fields = {name: value for name, value in sampling.items() if value is not None}
    return with_structured_outputs(fields)
