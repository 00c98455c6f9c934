"""The three programs: ``-h``, what they suggest, and streams that are closed, gone or full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import IO

import click
import pytest
from click.testing import CliRunner

from omlx_gateway.cli import main as gateway
from omlx_producer.cli.main import cli as submit
from omlx_producer.program import Program
from omlx_producer.terminal import write
from omlx_worker.cli import main as worker

PROGRAMS = {"omlx-submit": submit, "omlx-worker": worker, "omlx-gateway": gateway}
programs = pytest.mark.parametrize("name", PROGRAMS)


@click.group(cls=Program)
def speaker() -> None:
    """A program."""


@speaker.group()
def loud() -> None:
    """A group of commands."""


@speaker.command()
def speak() -> None:
    write("text\n")
    click.echo("text")
    write("text\n", err=True)


loud.add_command(speak)


@pytest.fixture
def gone() -> Iterator[IO[str]]:
    """A stream whose reader has gone."""
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as stream:
        yield stream


def exit_code(name: str, *args: str) -> object:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS.get(name, speaker).main(args, prog_name=name)
    return ended.value.code


@pytest.mark.parametrize(
    ("name", "args"),
    [
        *((name, ()) for name in PROGRAMS),
        ("omlx-submit", ("run",)),
        ("omlx-gateway", ("keys", "add")),
    ],
)
def test_a_letter_shows_the_help(name: str, args: tuple[str, ...]) -> None:
    short, long = (
        CliRunner().invoke(PROGRAMS[name], [*args, option], prog_name=name)
        for option in ("-h", "--help")
    )
    assert (short.exit_code, short.output) == (0, long.output)


@pytest.mark.parametrize(
    ("name", "command", "needed", "rarer"),
    [
        ("omlx-submit", "submit", "--temperature", "--min-p"),
        ("omlx-submit", "run", "--output", "--csv-safe"),
        ("omlx-worker", "run", "--embedded-redis", "--switch-after"),
        ("omlx-worker", "batch", "--template", "--mtp-depth"),
    ],
)
def test_the_help_begins_with_what_most_users_need(
    name: str, command: str, needed: str, rarer: str
) -> None:
    def shown(option: str) -> str:
        done = CliRunner().invoke(PROGRAMS[name], [command, option], prog_name=name)
        assert done.exit_code == 0
        return done.stdout

    short, whole = shown("-h"), shown("--help-all")
    assert len(short.splitlines()) <= 50
    assert (needed in short, rarer in short) == (True, False)
    assert needed in whole
    assert rarer in whole
    assert "--help-all  Show all " in short


@programs
def test_a_misspelt_option_of_a_program_is_recognised(name: str) -> None:
    done = CliRunner().invoke(PROGRAMS[name], ["--verison"], prog_name=name)
    assert done.exit_code == 2
    assert done.stderr == f"{name}: --verison: no such option; did you mean --version?\n"


def test_an_option_before_its_command_is_told_where_it_belongs() -> None:
    done = CliRunner().invoke(PROGRAMS["omlx-worker"], ["--model", "x"], prog_name="omlx-worker")
    assert done.exit_code == 2
    told = "--model: no such option; give it behind a command, see omlx-worker --help"
    assert done.stderr == f"omlx-worker: {told}\n"


@pytest.mark.parametrize(
    ("program", "args", "sentence"),
    [
        ("omlx-worker", ["speak", "--duty", "0.5"], "--duty: no such option; let cron run omlx-su"),
        ("omlx-worker", ["--prefix-dir=there"], "--prefix-dir: no such option; leave it out (aft"),
        ("omlx-worker", ["convert", "-o", "x"], "convert: no such command; use mlx_lm.convert,"),
        ("omlx-gateway", ["loud", "speak", "--rate", "3"], "--rate: no such option; set limits of"),
        ("omlx-worker", ["serve"], "serve: no such command; use omlx-worker run -m MODEL\n"),
        ("omlx-worker", ["start"], "start: no such command; use omlx-worker run -m MODEL\n"),
        ("omlx-gateway", ["serve"], "serve: no such command; leave it out: omlx-gateway alone se"),
        ("omlx-submit", ["loud", "jobs"], "jobs: no such command; see rq info, omlx-submit batch"),
        ("omlx-submit", ["loud", "feed"], "feed: no such command; leave it out (workers take th"),
        ("omlx-submit", ["speak", "--chat"], "--chat: no such option; leave it out (a text is a"),
        ("omlx-submit", ["speak", "--json-schema=x"], "--json-schema: no such option; use --schem"),
        ("omlx-worker", ["--allow-webhooks"], "--allow-webhooks: no such option; leave it out (we"),
        ("omlx-worker", ["--lookup-ring", "5"], "--lookup-ring: no such option; leave it out (dra"),
        ("omlx-worker", ["--draft-model=m"], "--draft-model: no such option; use --drafter MODE"),
        ("omlx-worker", ["--no-lookup"], "--no-lookup: no such option; use --drafter head,lookup "),
        ("omlx-worker", ["--no-calibration"], "--no-calibration: no such option; leave it out (--"),
        ("omlx-worker", ["--patience=5"], "--patience: no such option; leave it out (fixed"),
        ("omlx-worker", ["--stream-ttl=5"], "--stream-ttl: no such option; leave it out (fixed"),
        ("omlx-gateway", ["convert"], "convert: no such command; see omlx-gateway --help\n"),
        ("omlx-gateway", ["laud"], "laud: no such command; did you mean loud?\n"),
    ],
)
def test_an_option_or_command_that_is_gone_names_what_to_use(
    program: str, args: list[str], sentence: str
) -> None:
    done = CliRunner().invoke(speaker, args, prog_name=program)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"{program}: {sentence}")
    assert done.stderr.count("\n") == 1


@programs
@pytest.mark.parametrize(("stream", "option"), [("stdout", "--help"), ("stderr", "--verison")])
def test_a_reader_who_leaves_ends_a_program_quietly(
    name: str, stream: str, option: str, gone: IO[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, stream, gone)
    assert exit_code(name, option) == 141
    # What it could not write is gone, too: Python does not fail at exit.
    gone.flush()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_is_written_to_a_closed_stream_is_dropped(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, stream, None)
    assert exit_code("speaker", "speak") == 0
    getattr(sys, stream).close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
@programs
def test_a_disk_that_is_full_is_told_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", [name])
        assert exit_code(name, "--help") == 1
    assert capsys.readouterr().err == f"{name}: the output: No space left on device\n"
