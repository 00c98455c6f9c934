"""The commands of the documentation are known to the test that types them."""

from __future__ import annotations

import shlex
from itertools import chain

import click
import pytest

from omlx_gateway.cli import main as gateway
from omlx_producer.cli.main import cli as submit
from omlx_worker.cli import main as worker
from tests.helpers.documentation import ENDLESS, IN_THE_BACKGROUND, NOT_TYPED, PAGES, commands_of

COMMANDS = set(chain.from_iterable(map(commands_of, PAGES.values())))
MAX_WORDS = 1000
COMMAND_OF: dict[str, click.Command] = {
    "omlx-gateway": gateway,
    "omlx-submit": submit,
    "omlx-worker": worker,
}


def test_every_page_has_commands() -> None:
    assert all(map(commands_of, PAGES.values()))


def test_what_is_not_typed_as_printed_is_printed_somewhere() -> None:
    assert NOT_TYPED.keys() | ENDLESS | IN_THE_BACKGROUND.keys() <= COMMANDS


def test_the_readme_is_short_and_starts_with_a_clone() -> None:
    page = PAGES["README.md"]
    assert len(page.read_text().split()) < MAX_WORDS
    assert commands_of(page)[0].startswith("git clone ")


@pytest.mark.parametrize("command", sorted(c for c in COMMANDS if c.startswith("omlx-")))
def test_the_options_of_a_printed_command_exist(command: str) -> None:
    name, *words = shlex.split(command.split(" | ")[0].removesuffix("&"))
    chosen = COMMAND_OF[name]
    while isinstance(chosen, click.Group):
        context = click.Context(chosen)
        found = chosen.get_command(context, words[0]) or chosen.get_command(context, "submit")
        if found is None:
            break
        chosen, words = found, words[1:] if found.name == words[0] else words
    known = {option for each in chosen.params for option in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("-") and word != "-"} <= known
