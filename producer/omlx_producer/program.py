"""A program: its commands and their help, exit codes, and its end with a sentence on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from omlx_producer.environment import DOTENV, warn_of_unknown_variables
from omlx_producer.terminal import write

_Command = TypeVar("_Command", bound=Callable[..., Any])

JOB_ENDED_BADLY, INVALID, UNREACHABLE, NOT_ENDED = 1, 2, 3, 4
INTERRUPTED, BROKEN_PIPE = 130, 141


class Program(click.Group):
    """The commands of one program.

    What is written to a closed stdout or stderr is dropped. A reader who leaves ends the program
    quietly, and a file that cannot be written with one sentence.
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
    """End the program with its exit code after an interrupt or an error of a stream or a file."""
    try:
        yield
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
    """

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for param in sorted(options, key=lambda param: not isinstance(param, _Option)):
            if (record := param.get_help_record(ctx)) is not None:
                title = param.section if isinstance(param, _Option) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _Option(click.Option):
    def __init__(self, *args: Any, section: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


def option(*names: str, section: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """`click.option` in a section of the help of a `SectionedCommand`."""
    return click.option(*names, cls=_Option, section=section, **attributes)


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
