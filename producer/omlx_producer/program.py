"""A program: its commands and their help, exit codes, and its end with a sentence on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from omlx_producer.commands.gone import instead
from omlx_producer.environment import DOTENV, warn_of_unknown_variables
from omlx_producer.terminal import write

_Command = TypeVar("_Command", bound=Callable[..., Any])

JOB_ENDED_BADLY, INVALID, UNREACHABLE, NOT_ENDED = 1, 2, 3, 4
INTERRUPTED, BROKEN_PIPE = 130, 141
_HELP_ALL = "--help-all"


class Program(click.Group):
    """The commands of one program.

    What is written to a closed stdout or stderr is dropped. A reader who leaves ends the program
    quietly; arguments that cannot be used, or a file that cannot be written, with one sentence.
    """

    def __init__(
        self, *args: Any, context_settings: dict[str, Any] | None = None, **attributes: Any
    ) -> None:
        settings = {"help_option_names": ["-h", "--help"], **(context_settings or {})}
        super().__init__(*args, context_settings=settings, **attributes)

    def main(self, *args: Any, **extra: Any) -> Any:
        with _exit_codes():
            for name in ("stdout", "stderr"):
                if getattr(sys, name) is None:
                    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (until the end)
            return super().main(*args, **extra)

    # click ends with 1, without a word, if a broken pipe leaves one of these.

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _exit_codes():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_codes():
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """End the program with its exit code after an interrupt, wrong arguments, or an error of a
    stream or a file."""
    try:
        try:
            yield
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            with error.ctx.scope(cleanup=False) if error.ctx else contextlib.nullcontext():
                fail(INVALID, _usage_text(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.exit(BROKEN_PIPE)
    except OSError as error:
        fail(JOB_ENDED_BADLY, file_error(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                # Python fails if it cannot flush at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class SectionedCommand(click.Command):
    """A command whose help shows each option under the title of its section.

    Sections come in the order of their first options, and options without one at the end.

    Args:
        first: names of the options that most users need. The help shows these alone, and
            ``--help-all`` the others too. Without any, it shows all.
    """

    def __init__(self, *args: Any, first: Collection[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._first = first
        if first:
            count = sum(isinstance(param, _Option) for param in self.params)
            told = f"Show all {count} options."
            show = partial(click.Option, is_flag=True, is_eager=True, expose_value=False, help=told)
            self.params.append(show([_HELP_ALL], callback=_show_all))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        if self._first and not ctx.meta.get(_HELP_ALL):
            options = [p for p in options if p.name in self._first or not isinstance(p, _Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, _Option)):
            if (record := param.get_help_record(ctx)) is not None:
                title = param.section if isinstance(param, _Option) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _show_all(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class _Option(click.Option):
    def __init__(self, *args: Any, section: str, remedy: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section
        self._remedy = remedy or _allowed(self.type)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            read = super().type_cast_value(ctx, value)
            # NaN is in every range.
            if read != read:
                raise click.BadParameter("is no number")
            return read
        except click.BadParameter:
            if not self._remedy:
                raise
            got = repr(value) if isinstance(value, str) else ", ".join(map(repr, value))
            raise click.BadParameter(f"got {got}; give {self._remedy}", ctx, self) from None


def option(
    *names: str, section: str = "Options", **attributes: Any
) -> Callable[[_Command], _Command]:
    """`click.option` in a section of the help of a `SectionedCommand`.

    Args:
        attributes: also ``remedy``, what its value may be, in words that complete "give ...".
    """
    return click.option(*names, cls=_Option, section=section, **attributes)


def param_name(param: click.Parameter) -> str:
    """The longest name of an option, or that of an argument."""
    return (
        max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
    )


def _usage_text(error: click.UsageError) -> str:
    """What is wrong with the arguments: the name of one, its value, the remedy."""
    told = error.message.removesuffix(".")
    remedy = f"see {error.ctx.command_path} --help" if error.ctx else ""
    match error:
        case click.NoSuchOption():
            told = f"{error.option_name}: no such option"
            if error.possibilities:
                remedy = f"did you mean {error.possibilities[0]}?"
            if error.ctx and _is_of_a_command(error.option_name, error.ctx):
                remedy = f"give it behind a command, see {error.ctx.command_path} --help"
            remedy = instead(program_name(), error.option_name) or remedy
        case click.NoSuchCommand():
            told = f"{error.command_name}: no such command"
            if error.possibilities:
                remedy = f"did you mean {error.possibilities[0]}?"
            remedy = instead(program_name(), error.command_name) or remedy
        case click.MissingParameter(param=click.Parameter() as param):
            told = f"{param_name(param)}: missing"
        case click.BadParameter(param=click.Parameter() as param):
            told = f"{param_name(param)}: {told}"
    # Messages of this package have a remedy.
    return told if ";" in told or not remedy else f"{told}; {remedy}"


def _is_of_a_command(option: str, ctx: click.Context) -> bool:
    """Whether a command of a group has this option."""
    if not isinstance(group := ctx.command, click.Group):
        return False
    commands = [group.get_command(ctx, name) for name in group.list_commands(ctx)]
    return any(option in param.opts for command in commands if command for param in command.params)


def _allowed(kind: click.ParamType[Any]) -> str:
    """What a value of this type may be; empty if it does not say."""
    match kind:
        case click.Choice():
            return f"one of {', '.join(map(str, kind.choices))}"
        case click.IntRange() | click.FloatRange():
            what = "a whole number" if isinstance(kind, click.IntRange) else "a number"
            least = f"{kind.min or 0:g}"
            if kind.max is None:
                return f"{what} of at least {least}"
            return f"{what} from {least} to {kind.max:.0f}"
    return ""


json_option = option("--json", "as_json", section="Output", is_flag=True, help="Print JSON.")


def fail(exit_code: int, message: str) -> NoReturn:
    """End the program with one sentence on stderr, after the program's name."""
    say(message)
    sys.exit(exit_code)


def say(message: str) -> None:
    """Write a sentence to stderr, after the program's name."""
    write(f"{program_name()}: {message}\n", err=True)


def program_name() -> str:
    """The name of the running program. Call it from the thread of the command."""
    context = click.get_current_context(silent=True)
    return (context and context.find_root().info_name) or Path(sys.argv[0]).name


def is_given(name: str) -> bool:
    """Whether an option of the running command was typed, if that has no default."""
    context = click.get_current_context(silent=True)
    return context is not None and context.params.get(name) is not None


def check_variables() -> None:
    """Say which variables have no effect; end the program if ``.env`` cannot be read."""
    try:
        warn_of_unknown_variables(say)
    except (OSError, UnicodeDecodeError) as error:
        fail(INVALID, f"{DOTENV}: cannot be read ({error}); mend or remove it")


def file_error(error: OSError) -> str:
    """A sentence that names the file and its error."""
    return f"{error.filename or 'the output'}: {error.strerror or error}"


def port_error(options: str, error: OSError) -> str:
    """A sentence that names the options of a port that cannot be listened at, and the error."""
    # Python adds the address behind the reason.
    reason = (error.strerror or str(error)).partition(" (")[0]
    return f"{options}: nothing can be served there ({reason}); give another"
