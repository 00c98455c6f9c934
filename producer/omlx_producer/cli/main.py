"""The command ``omlx-submit``.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the job failed or was
cancelled, 2 usage or an invalid request, 3 Redis unreachable, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from omlx_producer.cli import batch, bulk, status, submit
from omlx_producer.cli.common import BROKEN_PIPE, INTERRUPTED


class DefaultGroup(click.Group):
    """A group that runs ``submit`` if the first argument names no command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in {"--help", "--version"}:
            args = ["submit", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of stdout is gone. Python must not fail when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(BROKEN_PIPE) from None


@click.group("omlx-submit", cls=DefaultGroup)
@click.version_option(package_name="omlx-queue")
def cli() -> None:
    """Submit a prompt to the queue and print its text as it is generated.

    \b
    omlx-submit "def fibonacci(n):"        submit a prompt; see omlx-submit submit --help
    echo "def fib(n):" | omlx-submit -     read it from stdin
    omlx-submit submit status              submit a prompt that is a command's name
    omlx-submit run rows.jsonl -o out.jsonl        run a file of requests
    """


for command in (*submit.COMMANDS, *status.COMMANDS, *bulk.COMMANDS, *batch.COMMANDS):
    cli.add_command(command)


def main() -> None:
    cli(prog_name="omlx-submit")
