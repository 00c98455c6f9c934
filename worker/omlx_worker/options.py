"""Shared by the commands: options from the fields of the settings, and errors that name them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ByteSize, ValidationError

from omlx_producer.environment import PREFIX, variable_set
from omlx_producer.program import INVALID, SectionedCommand, fail, is_given, option
from omlx_producer.wire.remedy import kinds_of, remedy_of
from omlx_worker.mac.buffers import prepare_mlx
from omlx_worker.settings import REMEDY, WorkerSettings

SECTIONS = {
    "Model": ("model", "model_alias", "mtp_from", "vision_from", "switch_after"),
    "Decoding": (
        *("max_batch", "default_max_tokens", "thinking_budget", "max_pixels", "mode"),
        *("drafter", "mtp_depth", "fixed_shapes", "state_dir"),
    ),
    "Queue and Redis": (
        *("redis_url", "embedded_redis", "redis_dir", "redis_grace", "allow_eviction"),
        "lease_seconds",
    ),
    "Memory": ("memory_limit", "prefix_cache"),
    "Life cycle": ("name", "burst", "drain_timeout", "allow_sleep"),
    "Logging": ("log_level", "log_format", "log_file"),
    "HTTP": ("http", "metrics_port", "metrics_host"),
}

_METAVARS: dict[Any, str] = {
    "drafter": "NAMES",
    "redis_url": "URL",
    "http": "PORT",
    "metrics_host": "ADDRESS",
    "log_file": "FILE",
    **{int: "N", float: "SECONDS", Path: "FOLDER", ByteSize: "SIZE"},
}
_SHORT = {"model": ("-m",)}


class ModelCommand(SectionedCommand):
    """A command with ``--model``. It refuses a bare argument and names the option."""

    allow_extra_args = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if len(by_model(args)) > 2:
            ctx.fail("--model is given more than once; omlx-worker run alone serves several.")
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            # Of an INPUT and a model without its option, either may be the extra one.
            has_input = any(isinstance(each, click.Argument) for each in self.params)
            model = "MODEL" if has_input else shlex.quote(rest[0])
            given = ctx.get_parameter_source("model") == ParameterSource.COMMANDLINE
            remedy = "leave it out" if given else f"for a model give -m {model}"
            ctx.fail(f"Got unexpected extra argument ({rest[0]}); {remedy}.")
        return rest


def settings_options(
    fields: Container[str] = WorkerSettings.model_fields,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add an option for each of these fields. One that the user leaves out is None."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for section, names in reversed(SECTIONS.items()):
            for name in reversed(names):
                if name in fields:
                    command = _option(name, section)(command)
        return command

    return add


def read_settings(options: Mapping[str, Any]) -> tuple[WorkerSettings, Container[str]]:
    """The settings, and the names of those from the command line.

    A wrong one ends the program with a sentence.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return WorkerSettings(**given), given
    except ValidationError as error:
        fail(INVALID, describe(error, given))


def describe(error: ValidationError, given: Container[str] = ()) -> str:
    """The first problem of the settings: option or variable, value, remedy.

    Args:
        given: the fields from the command line.
    """
    problem = error.errors(include_url=False)[0]
    name = str(problem["loc"][0])
    if problem["type"] == "missing":
        remedy = "give -m with a folder or a Hugging Face id, or -m demo, a toy to try"
        return f"{_flag(name)}: missing; {remedy}"
    source = _flag(name) if name in given else variable_set(PREFIX + name.upper())
    remedy = problem["msg"]
    if problem["type"] != REMEDY:
        remedy = f"give {remedy_of(WorkerSettings.model_fields[name])}"
    return f"{source}: got {shlex.quote(str(problem['input']))}; {remedy}"


def source_of(name: str) -> str:
    """What has set a field: the option of the running command, or a variable; else the option."""
    variable = None if is_given(name) else variable_set(PREFIX + name.upper())
    return variable or _flag(name)


def by_source(sentence: str) -> str:
    """A sentence that begins with an option, with the variable in place of it that has set it."""
    flag = sentence.partition(" ")[0].rstrip(":")
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in WorkerSettings.model_fields:
        return source_of(name) + sentence.removeprefix(flag)
    return sentence


def arguments_of(options: Mapping[str, Any]) -> list[str]:
    """The arguments of these options, without those that the user left out."""
    arguments = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(_flag(name) if value else _flag(f"no_{name}"))
        elif value is not None:
            arguments += [_flag(name), str(value)]
    return arguments


def start_advice(settings: WorkerSettings, options: Mapping[str, Any]) -> str:
    """How to start a worker with these options, in words that ``and`` follows.

    A URL that may hold a password is not shown.
    """
    from omlx_producer.connection import without_password

    url = options["redis_url"]
    secret = url is not None and without_password(url) != url
    left_out = {"redis_url"} if secret else set()
    # The folder is the embedded server's.
    left_out |= {"redis_dir"} if settings.redis_url else set()
    given = arguments_of({name: each for name, each in options.items() if name not in left_out})
    server = [] if settings.redis_url else ["--embedded-redis"]
    needs = f"with {PREFIX}REDIS_URL set to the same URL " if secret else ""
    return f"{needs}start {shlex.join(['omlx-worker', 'run', *given, *server])} in another terminal"


def require_mlx() -> None:
    """Prepare to import MLX. Ends the program with a sentence if it is not installed."""
    require("mlx", "mlx_lm")
    prepare_mlx()


def require(*packages: str, extra: str = "worker") -> None:
    """End the program with a sentence if one of these packages is not installed."""
    for package in packages:
        if find_spec(package) is None:
            remedy = f"install it with: pip install 'omlx-queue[{extra}]'"
            fail(INVALID, f"{package} is not installed; {remedy}")


def _option(name: str, section: str) -> Callable[..., Any]:
    field = WorkerSettings.model_fields[name]
    [kind] = kinds_of(field)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    flags, attributes = [_flag(name), *_SHORT.get(name, ())], dict[str, Any]()
    if kind is bool:
        attributes["is_flag"] = True
        flags[0] += flags[0].replace("--", "/--no-") if default else ""
    elif get_origin(kind) is Literal:
        attributes["type"] = click.Choice(get_args(kind))
    else:
        attributes["type"] = click.Path() if kind is Path else str
        attributes["metavar"] = _METAVARS.get(name) or _METAVARS.get(kind, "NAME")
    help_text = field.description
    if default:
        help_text = f"{field.description}  [default: {_shown(name, default)}]"
    return option(*flags, name, section=section, default=None, help=help_text, **attributes)


def _shown(name: str, default: Any) -> str:
    """A default as the help shows it."""
    match default:
        case True:
            return name
        case ByteSize():
            return default.human_readable()
        case float():
            return f"{default:g}"
    return str(default).replace(str(Path.home()), "~")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def by_model(args: Sequence[str]) -> list[list[str]]:
    """The arguments before the first ``--model``, then those from each to the next."""
    parts: list[list[str]] = [[]]
    for arg in args:
        if arg in ("-m", "--model") or arg.startswith(("--model=", "-m")):
            parts.append([])
        parts[-1].append(arg)
    return parts
