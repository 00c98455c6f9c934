"""omlx-submit as a group: its default command, its help, completion, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from omlx_producer.cli.main import MODULES, cli, load
from omlx_producer.cli.submit import submit


def run(*args: str, **env: str) -> Result:
    return CliRunner().invoke(cli, args, env=env, prog_name="omlx-submit")


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that ``submit`` got."""
    got: list[str] = []
    monkeypatch.setattr(submit, "callback", lambda prompt, **_: got.append(prompt))
    return got


@pytest.mark.parametrize(
    ("word", "near"), [("stauts", "status"), ("STATUS", "status"), ("modles", "models")]
)
def test_a_word_close_to_a_command_is_refused(prompts: list[str], word: str, near: str) -> None:
    done = run(word)
    assert done.exit_code == 2
    assert done.stderr == (
        f"omlx-submit: {word}: no such command; did you mean {near}? "
        f"To submit it as a prompt: omlx-submit -- {word}\n"
    )
    assert run("--", word).exit_code == run("submit", word).exit_code == 0
    assert prompts == [word, word]


@pytest.mark.parametrize("args", [["jobs", "--state", "failed"], ["--json", "requeue", "id"]])
def test_a_command_that_is_gone_names_what_to_use_and_is_no_prompt(
    prompts: list[str], args: list[str]
) -> None:
    done = run(*args)
    assert done.exit_code == 2
    assert ": no such command; " in done.stderr
    assert "rq " in done.stderr
    assert prompts == []


@pytest.mark.parametrize("word", ["help", "list", "workers", "version", "Help"])
@pytest.mark.parametrize("options", [(), ("--redis-url", "redis://host", "--json")])
def test_a_command_of_other_programs_is_refused_with_a_hint(
    prompts: list[str], word: str, options: tuple[str, ...]
) -> None:
    done = run(*options, word)
    assert done.exit_code == 2
    assert f"{word}: no such command; see omlx-submit " in done.stderr
    assert f"To submit it as a prompt: omlx-submit -- {word}" in done.stderr
    assert prompts == []
    assert run("--", word).exit_code == 0
    assert prompts == [word]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("status", ["--redis-url", "redis://host", "status"]),
        ("status", ["--redis-url=redis://host", "--json", "status", "j"]),
        ("status", ["--watch", "status"]),
        ("status", ["--watch", "3", "status"]),
        ("models", ["--json", "models"]),
        ("cancel", ["--redis-url", "cancel", "cancel", "j"]),
        ("results", ["-o", "out.jsonl", "results", "batch-0"]),
        ("run", ["-m", "qwen", "--seed", "7", "run", "rows.jsonl", "-o", "out.jsonl"]),
    ],
)
def test_options_may_come_before_a_command(
    monkeypatch: pytest.MonkeyPatch, prompts: list[str], name: str, args: list[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(load(name), "callback", lambda **_: ran.append(name))
    done = run(*args)
    assert done.exit_code == 0, done.stderr
    assert (ran, prompts) == ([name], [])


def test_an_option_that_the_command_lacks_is_told() -> None:
    done = run("--temperature", "0", "status")
    assert done.exit_code == 2
    assert "--temperature: no such option" in done.stderr


def test_a_misspelt_command_after_options_is_refused(prompts: list[str]) -> None:
    done = run("--redis-url", "redis://host", "stauts")
    assert done.exit_code == 2
    assert "did you mean status?" in done.stderr
    assert prompts == []


@pytest.mark.parametrize(
    "args", [["--model", "status", "x"], ["--json", "x"], ["-n", "2", "--", "x"], ["x", "--json"]]
)
def test_the_name_of_a_command_may_be_a_value(prompts: list[str], args: list[str]) -> None:
    done = run(*args)
    assert done.exit_code == 0, done.stderr
    assert prompts == ["x"]


def test_a_second_word_is_no_command(prompts: list[str]) -> None:
    done = run("what is the", "status")
    assert done.exit_code == 2
    assert "PROMPT: got 2 arguments; quote the prompt" in done.stderr
    assert prompts == []


@pytest.mark.parametrize("prompt", ["hello", "status of", "status\n", "def f(n):", "x"])
def test_another_prompt_is_submitted(prompts: list[str], prompt: str) -> None:
    assert run(prompt).exit_code == 0
    assert prompts == [prompt]


def test_an_unknown_variable_is_told_once() -> None:
    done = run("submit", "--help", OMLX_QUEUE_REDIS_ULR="redis://a")
    assert done.stderr == (
        "omlx-submit: OMLX_QUEUE_REDIS_ULR has no effect: did you mean OMLX_QUEUE_REDIS_URL?\n"
    )


def test_a_broken_file_of_variables_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(".env").write_bytes(b"A=\xff")
    done = run("status")
    assert done.exit_code == 2
    assert done.stderr.startswith("omlx-submit: .env: cannot be read (")


def test_a_line_of_the_file_that_is_no_variable_is_told_once_with_its_number(
    tmp_path: Path,
) -> None:
    (tmp_path / ".env").write_text("# a comment\nA=b\n\n\nthis is not env syntax\nexport C='d'\n\n")
    code = "from omlx_producer.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "watch", "j", "--redis-url", "redis://127.0.0.1:1"],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )
    first, *others = done.stderr.splitlines()
    assert first == "omlx-submit: .env: line 5: not NAME=VALUE"
    assert not any("dotenv" in line or ".env" in line for line in others)


@pytest.mark.parametrize("args", [(), *((name,) for name in MODULES)])
def test_help_is_whole_on_a_narrow_terminal(args: tuple[str, ...]) -> None:
    done = run(*args, "--help", COLUMNS="50")
    assert done.exit_code == 0, done.exception
    assert "..." not in done.stdout.partition("\n")[2]


def test_help_has_sections_and_shows_defaults() -> None:
    shown = run("submit", "--help-all").stdout
    titles = [line for line in shown.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert [title.partition(" ")[0].strip(":") for title in titles] == [
        "Request",
        "Sampling",
        "Answer",
        "Output",
        "Redis",
        "Options",
    ]
    assert "[default: default]" in shown
    assert "-m, --model ALIAS" in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("st", {"status"}),
        ("re", {"result", "results", "resume", "retry"}),
        ("--temp", {"--temperature"}),
        ("status --wa", {"--watch"}),
        ("stauts --mod", {"--model"}),
    ],
)
def test_the_shell_completes_what_is_typed(typed: str, offered: set[str]) -> None:
    done = run(
        _OMLX_SUBMIT_COMPLETE="bash_complete",
        COMP_WORDS=f"omlx-submit {typed}",
        COMP_CWORD=str(len(typed.split())),
    )
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


def test_the_version_imports_no_client() -> None:
    code = (
        "import sys\n"
        "from omlx_producer.cli.main import cli\n"
        "cli(['--version'], standalone_mode=False)\n"
        "print({'redis', 'rq', 'pydantic', 'rich'} & set(sys.modules))"
    )
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_its_own_name(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
