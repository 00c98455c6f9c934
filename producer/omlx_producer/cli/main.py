"""The command ``omlx-submit``.

Data goes to stdout, everything else to stderr. Exit codes: 0 done, 1 the job failed or was
cancelled, 2 usage or an invalid request, 3 Redis unreachable, 4 `result --timeout` of a job or
`results` of a batch that has not ended, 130 interrupted, 141 the reader of its output has gone.
"""

from __future__ import annotations

import difflib
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from omlx_producer.commands.gone import instead
from omlx_producer.program import INVALID, Program, check_variables, fail

DEFAULT = "submit"
# The modules of the commands, by section of the help. They are imported when needed.
SECTIONS = {
    "Submit and read": {"submit": "submit", "watch": "submit", "result": "submit"},
    "Files of requests": {"run": "bulk", "embed": "bulk", "retry": "bulk", "results": "batch"},
    "Look and cancel": {
        "status": "status",
        "models": "status",
        "batches": "operate",
        "cancel": "status",
    },
    "Operate": dict.fromkeys(("pause", "resume", "drain", "delete"), "operate"),
}
MODULES = {name: module for section in SECTIONS.values() for name, module in section.items()}
# Words that other programs have for commands, and what does that here.
ELSEWHERE = {
    "help": "--help",
    "version": "--version",
    **dict.fromkeys(("list", "workers"), "status"),
}
# A word at least this similar to a command's name counts as a misspelling of it.
CLOSE = 0.75


class SubmitGroup(Program):
    """Commands that are imported when needed; without the name of one, ``submit`` runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return load(cmd_name) if cmd_name in MODULES else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, MODULES))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), load(name).get_short_help_str(1000)) for name in names]
                )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        place = None if args[:1] == ["--version"] else first_word(args)
        word = None if place is None else args[place]
        if place is not None and word in MODULES:
            args = [word, *args[:place], *args[place + 1 :]]
        elif args and args[0] not in {*ctx.help_option_names, "--version"}:
            if word is not None and not ctx.resilient_parsing:
                refuse_no_prompt(word)
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = super().shell_complete(ctx, incomplete)
        if incomplete.startswith("-"):
            own = {item.value for item in items}
            others = load(DEFAULT).shell_complete(ctx, incomplete)
            items += [item for item in others if item.value not in own]
        return items


def load(name: str) -> click.Command:
    """Import a command."""
    command: click.Command = getattr(import_module(f"omlx_producer.cli.{MODULES[name]}"), name)
    return command


def first_word(args: list[str]) -> int | None:
    """The index of the command, or else of the prompt; None without either, and after ``--``.

    Options may come before a command: its own, or those of `DEFAULT`.
    """
    for index, word in enumerate(args):
        if word == "--":
            return None
        if word in MODULES and skip_options(args[:index], DEFAULT, word) == index:
            return index
    index = skip_options(args, DEFAULT)
    return index if index < len(args) and args[index] != "--" else None


def skip_options(args: list[str], *commands: str) -> int:
    """The index after the options that begin the arguments; beyond the end if a value is missing.

    Args:
        commands: whose options have values.
    """
    params = (param for command in commands for param in load(command).params)
    options = [param for param in params if isinstance(param, click.Option) and not param.is_flag]
    # By name, whether its value may be left out.
    valued = {
        name: option.to_info_dict()["flag_value"] is not None
        for option in options
        for name in option.opts
    }
    index = 0
    while index < len(args) and args[index].startswith("-") and args[index] not in {"-", "--"}:
        optional, index = valued.get(args[index]), index + 1
        given = index < len(args) and not args[index].startswith("-")
        if optional is False or (optional and given):
            index += 1
    return index


def refuse_no_prompt(word: str) -> None:
    """End the program if a word is probably meant as a command."""
    if replacement := instead("omlx-submit", word.lower()):
        advice = f"{replacement}."
    elif word.lower() in ELSEWHERE:
        advice = f"see omlx-submit {ELSEWHERE[word.lower()]}."
    elif near := difflib.get_close_matches(word.lower(), MODULES, n=1, cutoff=CLOSE):
        advice = f"did you mean {near[0]}?"
    else:
        return
    if not any(character.isspace() for character in word):
        fail(
            INVALID,
            f"{word}: no such command; {advice} To submit it as a prompt: omlx-submit -- {word}",
        )


@click.group("omlx-submit", cls=SubmitGroup, context_settings={"show_default": True})
@click.version_option(package_name="omlx-queue")
def cli() -> None:
    """Submit a text to the queue and print the answer as it is generated.

    \b
    omlx-submit "Why is the sky blue?"     submit a text; see omlx-submit submit --help
    echo "def fib(n):" | omlx-submit -     read it from stdin
    omlx-submit -- status                  submit a prompt that is a command's name
    omlx-submit run rows.jsonl -o out.jsonl        run a file of requests
    """
    check_variables()


def main() -> None:
    cli(prog_name="omlx-submit")
