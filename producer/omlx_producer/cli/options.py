"""The fields of a request as command line options of the same names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from omlx_producer.cli.common import option
from omlx_producer.wire import DEFAULT_CHAT_TOKENS, DEFAULT_MAX_TOKENS, LOOPS, NamedSchema

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_WRAPPER = {field.alias or name for name, field in NamedSchema.model_fields.items()}
_CONSTRAINTS = ("regex", "choice")

# In the title, because only the worker knows the other defaults.
_sampling = partial(option, section="Sampling (defaults: the model's, else OpenAI's)")
_DEFAULTS = {
    "max_completion_tokens": f"{DEFAULT_CHAT_TOKENS}, with --raw {DEFAULT_MAX_TOKENS}",
    "n": "1",
}

_NUMBERS: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("--max-completion-tokens", "--max-tokens"), int, "Generate at most this many tokens."),
    (("--thinking-token-budget", "--thinking-budget"), int, "Think for this many tokens at most."),
    (("--temperature",), float, "0 takes the most likely token; up to 2."),
    (("--top-p",), float, "Keep the likeliest tokens up to this total probability."),
    (("--top-k",), int, "Keep this many of the likeliest tokens; 0 keeps all."),
    (("--min-p",), float, "Keep tokens this likely relative to the likeliest."),
    (("--repetition-penalty",), float, "Above 1 makes repeated tokens less likely."),
    (("--presence-penalty",), float, "Subtracted from the logits of repeated tokens."),
    (("--frequency-penalty",), float, "Subtracted once per occurrence of the token."),
    (("--seed",), int, "The same seed gives the same text."),
    (("-n", "--n"), int, "Generate this many choices."),
    (("--draft-depth",), int, "Draft at most this many tokens per step; up to 8."),
    (("--top-logprobs",), int, "Report this many alternatives; needs --logprobs."),
)


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


def _number(names: tuple[str, ...], kind: type, text: str) -> Callable[[_Command], _Command]:
    field = names[0].strip("-").replace("-", "_")
    return _sampling(*names, field, type=kind, help=text, show_default=_DEFAULTS.get(field, False))


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


def model_option(help: str) -> Callable[[_Command], _Command]:
    """The option for the model's alias."""
    return option("-m", "--model", section="Request", metavar="ALIAS", help=help)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field of sampling, and those of the answer's form."""
    options = [_number(names, kind, text) for names, kind, text in _NUMBERS]
    options += [
        _sampling("--stop", multiple=True, callback=texts, help="Text to stop at; repeatable."),
        _sampling(
            "--logit-bias",
            multiple=True,
            callback=_biases,
            metavar="ID=VALUE",
            help="Add to a token's logit; repeatable.",
        ),
        _sampling("--logprobs", is_flag=True, default=None, help="Report log-probabilities."),
        _sampling("--draft/--no-draft", default=None, help="Draft tokens if the model can."),
        _sampling("--cache/--no-cache", default=None, help="Reuse what was read of like prompts."),
        _sampling("--cache-salt", metavar="TEXT", help="Reuse it within this TEXT alone."),
        _sampling(
            "--completion-window",
            metavar="TIME",
            help="Fail if not finished in this time, as in 24h or 90m.",
        ),
        _sampling(
            "--end-loops/--no-end-loops",
            "repetition_detection",
            default=None,
            callback=_loops,
            help="End texts that loop 32 times and for 1,024 tokens.",
        ),
        _sampling("--ignore-eos", is_flag=True, default=None, help="Continue after the end token."),
    ]
    for decorate in reversed([*options, *form_options()]):
        command = decorate(command)
    return command


def refuse_conflicts(raw: bool, system: str | None, sampling: Mapping[str, Any]) -> None:
    """Refuse two options of which a request has only one."""
    raws = {"--raw": raw or None}
    forms = {
        "--json-schema": sampling["response_format"],
        "--regex": sampling["regex"],
        "--choice": sampling["choice"],
    }
    for alone in (raws | {"--system": system}, raws | {"--tools": sampling["tools"]}, forms):
        if len(both := [name for name, value in alone.items() if value is not None]) > 1:
            raise click.UsageError(
                f"{both[1]} does not go with {both[0]}; leave one of the two out."
            )


def given(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request for the options that the user gave."""
    fields = {name: value for name, value in sampling.items() if value is not None}
    return with_structured_outputs(fields)
