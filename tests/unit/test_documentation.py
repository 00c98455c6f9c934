"""The commands of the documentation are known to the test that types them."""

from __future__ import annotations

import plistlib
import re
import shlex
import tomllib
from itertools import chain
from pathlib import Path

import click
import pytest

from omlx_gateway.cli import main as gateway
from omlx_producer.cli.main import cli as submit
from omlx_worker.cli import main as worker
from omlx_worker.settings import WorkerSettings
from tests.helpers.documentation import (
    ENDLESS,
    FRAGMENTS,
    IN_THE_BACKGROUND,
    NOT_RUN,
    NOT_TYPED,
    PAGES,
    ROOT,
    blocks_of,
    commands_of,
    first_line,
)

COMMANDS = set(chain.from_iterable(map(commands_of, PAGES.values())))
DOCS = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
]
NAMED = {
    re.sub(r"\s+", " ", command)
    for page in DOCS
    for command in (
        *re.findall(r"`(omlx-(?:submit|worker|gateway) [^`]+)`", page.read_text()),
        *(command for command in commands_of(page) if command.startswith("omlx-")),
    )
}
MAX_WORDS = 1000
SCRIPTS = sorted(p for p in (ROOT / "scripts").rglob("*.py") if "python -m" in p.read_text())
MODEL_OPTIONS = ROOT / "scripts" / "bench" / "models.py"
COMMAND_OF: dict[str, click.Command] = {
    "omlx-gateway": gateway,
    "omlx-submit": submit,
    "omlx-worker": worker,
}


def test_every_page_has_commands() -> None:
    assert all(map(commands_of, PAGES.values()))


def test_what_is_not_typed_as_printed_is_printed_somewhere() -> None:
    assert NOT_TYPED.keys() | ENDLESS | IN_THE_BACKGROUND.keys() <= COMMANDS
    programs = {first_line(block) for page in PAGES.values() for block in blocks_of(page, "python")}
    assert FRAGMENTS.keys() | NOT_RUN.keys() <= programs


def test_setup_is_printed_with_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = [re.findall(r"scripts/setup\b *([\w,]*)", page.read_text()) for page in PAGES.values()]
    named = [words.split(",") for words in chain.from_iterable(given)]
    assert named
    assert set(chain.from_iterable(named)) <= project["optional-dependencies"].keys()


def test_the_readme_is_short_and_starts_with_a_clone() -> None:
    page = PAGES["README.md"]
    assert len(page.read_text().split()) < MAX_WORDS
    assert commands_of(page)[0].startswith("git clone ")
    assert "./scripts/quickstart" in commands_of(page)
    assert "`./scripts/test`" in page.read_text()


def anchors_of(page: Path) -> set[str]:
    """The names that GitHub gives to a page's sections."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.stem)
def test_links_lead_to_sections_that_exist(page: Path) -> None:
    ours = r"https://github\.com/omlx-queue/omlx-queue/(?:blob|tree)/main/(\S+)$"
    links = [(page.parent, link) for link in re.findall(r"\]\(([^)\s:]+)\)", page.read_text())]
    links += [(ROOT, link) for link in re.findall(ours, page.read_text(), re.MULTILINE)]
    for folder, link in links:
        path, _, section = link.partition("#")
        target = (folder / path).resolve() if path else page
        assert target.exists(), link
        assert not section or section in anchors_of(target), link


@pytest.mark.parametrize("command", sorted(NAMED))
def test_the_options_of_a_printed_command_exist(command: str) -> None:
    name, *words = shlex.split(re.split(r" \| | -- ", command)[0].removesuffix("&"))
    chosen = COMMAND_OF[name]
    while words and isinstance(chosen, click.Group):
        context = click.Context(chosen)
        found = chosen.get_command(context, words[0]) or chosen.get_command(context, "submit")
        if found is None:
            break
        chosen, words = found, words[1:] if found.name == words[0] else words
    known = {"--help", "--help-all"} | {
        option for each in chosen.params for option in (*each.opts, *each.secondary_opts)
    }
    assert {word for word in words if word.startswith("-") and word != "-"} <= known


def test_the_services_of_the_examples_run_the_worker_of_a_clone() -> None:
    unit = (ROOT / "examples/service/omlx-worker.service").read_text()
    [command] = re.findall(r"^ExecStart=%h/(.*)", unit, re.MULTILINE)
    agent = plistlib.loads((ROOT / "examples/service/omlx.worker.plist").read_bytes())
    program, *words = agent["ProgramArguments"]
    assert [program.removeprefix("/Users/ME/"), *words] == command.split()
    test_the_options_of_a_printed_command_exist(command.removeprefix("omlx-queue/.venv/bin/"))
    stop = WorkerSettings.model_fields["drain_timeout"].default + 15
    assert (agent["ExitTimeOut"], f"TimeoutStopSec={stop:.0f}\n" in unit) == (stop, True)


@pytest.mark.parametrize("page", [*DOCS, *SCRIPTS], ids=lambda p: p.stem)
def test_the_options_of_a_printed_script_exist(page: Path) -> None:
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for module, options in re.findall(r"python -m scripts\.([\w.]+)([^`\n]*)", text):
        path = ROOT / "scripts" / module.replace(".", "/")
        script = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        known = script.read_text() + MODEL_OPTIONS.read_text()
        printed = re.findall(r" (--[\w-]+)", options)
        assert [option for option in printed if f'"{option}"' not in known] == []
