"""A program: its commands, ``-h``, and its end when a stream or a file fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from omlx_producer.cli.common import (
    BROKEN_PIPE,
    INTERRUPTED,
    JOB_ENDED_BADLY,
    fail,
    file_error,
)


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
