"""The options of omlx-worker, and the variables that set the same."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from omlx_producer.program import INVALID
from omlx_producer.wire.remedy import kinds_of, remedy_of
from omlx_worker import cli
from omlx_worker.models_option import ModelsCommand, read_models
from omlx_worker.options import SECTIONS
from omlx_worker.run import run
from omlx_worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMLX_QUEUE_MODEL", "demo")


def invoke(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env=variables, prog_name="omlx-worker")


def without_mlx(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.modules['mlx'] = None; from omlx_worker import cli; "
        "cli.main(sys.argv[1:], prog_name='omlx-worker')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )


def test_every_setting_is_an_option_of_one_section() -> None:
    names = [name for names in SECTIONS.values() for name in names]
    assert sorted(names) == sorted(WorkerSettings.model_fields)


def test_the_help_shows_options_in_sections_with_their_defaults() -> None:
    lines = invoke("run", "--help-all").stdout.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith((" ", "Usage"))]
    assert titles == [f"{title}:" for title in (*SECTIONS, "Options")]
    text = " ".join(" ".join(lines).split())
    assert "--max-batch N Rows at once, at most; else as many as pay, up to 128." in text
    assert "--model NAME A folder, a Hugging Face id, or demo, a toy to try. --" in text
    assert "--drafter NAMES Who drafts: head or a model, lookup, both, or none." in text
    assert "[default: head,lookup]" in text
    assert "--redis-grace SECONDS Seconds that Redis may be away. [default: 600]" in text
    assert "--burst End when the queues are empty. --" in text
    assert "--prefix-cache SIZE For shared prefixes" in text


@pytest.mark.parametrize("command", ["run", "bench"])
def test_the_model_has_a_short_option(command: str) -> None:
    model = next(param for param in cli.main.commands[command].params if param.name == "model")
    assert set(model.opts) == {"-m", "--model"}


@pytest.mark.parametrize(
    ("command", "model"),
    [
        *((command, "'my model'") for command in ("run", "check", "bench")),
        ("batch rows.csv", "MODEL"),
    ],
)
def test_a_model_without_its_option_is_told_of_it(command: str, model: str) -> None:
    result = invoke(*command.split(), "my model")
    assert result.exit_code == 2
    assert f"extra argument (my model); for a model give -m {model}\n" in result.stderr
    assert "(b); leave it out\n" in invoke(*command.split(), "-m", "a", "b").stderr


@pytest.mark.parametrize("command", ["run", "check", "bench", "demo"])
def test_commands_prepare_the_machine_before_they_import_mlx(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise SystemExit(77)

    monkeypatch.setattr("omlx_worker.options.prepare_mlx", stop)
    assert invoke(command).exit_code == 77


def test_every_option_has_a_summary() -> None:
    options = [
        (command.name, param.name)
        for command in cli.main.commands.values()
        for param in command.params
        if isinstance(param, click.Option) and not param.help
    ]
    assert options == []


def test_a_wrong_variable_is_named_as_the_user_wrote_it() -> None:
    result = invoke("run", OMLX_QUEUE_MAX_BATCH="0", OMLX_QUEUE_MODE="auto")
    assert result.exit_code == 2
    said = "OMLX_QUEUE_MAX_BATCH: got 0; give a whole number from 1 to 1024"
    assert result.stderr == f"omlx-worker: {said}\n"
    result = invoke("run", OMLX_QUEUE_MODE="fast")
    said = "OMLX_QUEUE_MODE: got fast; give one of auto, hybrid, mtp and batched"
    assert result.stderr == f"omlx-worker: {said}\n"
    result = invoke("run", OMLX_QUEUE_BURST="perhaps")
    assert "OMLX_QUEUE_BURST: got perhaps; give true or false" in result.stderr


def test_a_wrong_value_is_told_with_the_file_that_has_it() -> None:
    Path(".env").write_text("OMLX_QUEUE_MAX_BATCH=0\n")
    assert "OMLX_QUEUE_MAX_BATCH in .env: got 0; give" in invoke("run").stderr
    assert "worker: --max-batch: got 0; give" in invoke("run", "--max-batch", "0").stderr
    result = invoke("run", "--max-batch", "1", OMLX_QUEUE_LOG_FILE="/dev/null/worker.log")
    assert "worker: OMLX_QUEUE_LOG_FILE /dev/null/worker.log: File exists; " in result.stderr


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("run", "MODEL", "no/such/folder"),
        ("check", "MODEL", "no/such/folder"),
        ("bench", "MODEL", "no/such/folder"),
        ("run", "MEMORY_LIMIT", "1MB"),
        ("run", "EMBEDDED_REDIS", "true"),
    ],
)
def test_what_a_variable_has_set_wrongly_is_told_with_the_variable(
    redis_url: str, command: str, name: str, value: str
) -> None:
    url = ["--redis-url", redis_url] if command == "run" else []
    result = invoke(command, *url, **{f"OMLX_QUEUE_{name}": value})
    assert result.exit_code == INVALID, result.output
    assert f"omlx-worker: OMLX_QUEUE_{name}" in result.stderr


def test_a_model_drafts_up_to_four_tokens_itself() -> None:
    assert WorkerSettings(mtp_depth=4).mtp_depth == 4
    result = invoke("run", OMLX_QUEUE_MTP_DEPTH="5")
    assert "OMLX_QUEUE_MTP_DEPTH: got 5; give a whole number from 0 to 4\n" in result.stderr


@pytest.mark.parametrize(
    ("given", "own", "lookups"),
    [
        ("head,lookup", "head", 8),
        ("lookup, org/small", "org/small", 8),
        ("head", "head", 0),
        ("lookup", "lookup", 8),
        ("none", "none", 0),
    ],
)
def test_a_drafter_is_alone_or_beside_lookup(given: str, own: str, lookups: int) -> None:
    settings = WorkerSettings(drafter=given)
    assert (settings.own_drafter, settings.lookup_depth) == (own, lookups)


@pytest.mark.parametrize("given", ["", "head,", "head,org/small", "none,lookup", "lookup,lookup"])
def test_other_drafters_are_refused(given: str) -> None:
    result = invoke("run", "--drafter", given)
    remedy = "give head, lookup, none or a model, or lookup beside one, as in head,lookup"
    said = f"omlx-worker: --drafter: got {shlex.quote(given)}; {remedy}\n"
    assert (result.exit_code, result.stderr) == (2, said)


def test_every_setting_that_can_be_wrong_has_a_remedy() -> None:
    for field in WorkerSettings.model_fields.values():
        assert Path in kinds_of(field) or remedy_of(field)


def test_fixed_shapes_draft_only_where_company_does_not_decide() -> None:
    assert WorkerSettings(fixed_shapes=True).depth == 0
    assert WorkerSettings(fixed_shapes=True, mode="mtp").depth == 3
    result = invoke("run", "--fixed-shapes", OMLX_QUEUE_MODE="hybrid")
    assert result.exit_code == 2
    assert "--mode hybrid drafts for a row alone only; give mtp or batched" in result.stderr


def test_sizes_have_units() -> None:
    settings = WorkerSettings(prefix_cache="1.5GB", memory_limit="2GiB")
    assert (settings.prefix_cache, settings.memory_limit) == (1_500_000_000, 2**31)
    assert WorkerSettings().prefix_cache is None
    assert WorkerSettings(prefix_cache="0").prefix_cache == 0


def test_a_wrong_size_of_prefixes_is_refused() -> None:
    result = invoke("run", "--prefix-cache", "much")
    sentence = "--prefix-cache: got much; give a size such as 2GB, or 0"
    assert (result.exit_code, result.stderr) == (2, f"omlx-worker: {sentence}\n")


def test_the_environment_wins_over_the_file_of_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text("OMLX_QUEUE_MAX_BATCH=3\nOMLX_QUEUE_MTP_DEPTH=1\nDATABASE_URL=x\n")
    monkeypatch.setenv("OMLX_QUEUE_MTP_DEPTH", "2")
    settings = WorkerSettings()
    assert (settings.max_batch, settings.mtp_depth) == (3, 2)


def test_a_variable_with_an_unknown_name_is_told() -> None:
    result = invoke("run", "--max-batch", "0", OMLX_QUEUE_MAX_BACH="1")
    said = "omlx-worker: OMLX_QUEUE_MAX_BACH has no effect: did you mean OMLX_QUEUE_MAX_BATCH?"
    assert result.stderr.splitlines()[0] == said


def test_a_file_of_variables_that_is_no_text_is_told_with_the_remedy() -> None:
    Path(".env").write_bytes(b"\xff\xfe")
    result = invoke("run")
    assert result.exit_code == 2
    assert result.stderr.startswith("omlx-worker: .env: ")
    assert result.stderr.count("\n") == 1


def test_a_log_that_cannot_be_written_is_refused() -> None:
    result = invoke("run", "--log-file", "/dev/null/worker.log")
    said = "--log-file /dev/null/worker.log: File exists; give another file"
    assert (result.exit_code, result.stderr) == (2, f"omlx-worker: {said}\n")


@pytest.mark.parametrize(
    "command",
    [
        "run",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("demo", "bench")),
    ],
)
def test_a_command_that_needs_mlx_says_what_to_install(command: str) -> None:
    ended = without_mlx(*command.split())
    assert ended.returncode == 2
    remedy = "install it with: pip install 'omlx-queue[worker]'"
    assert ended.stderr == f"omlx-worker: mlx is not installed; {remedy}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--help"],
        *(pytest.param([given], marks=pytest.mark.slow) for given in ("--version", "--help")),
    ],
)
def test_version_and_help_need_no_mlx(arguments: list[str]) -> None:
    ended = without_mlx(*arguments)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "omlx-worker" in ended.stdout


def test_only_what_loads_a_model_imports_mlx_and_only_a_command_what_it_needs() -> None:
    code = (
        "import sys; from omlx_worker import cli; print(*sys.modules); "
        "import omlx_worker.batch, omlx_worker.control.worker, omlx_worker.demo.run; "
        "import omlx_gateway.app, omlx_producer.cli.submit; print(*sys.modules)"
    )
    output = subprocess.check_output(
        [sys.executable, "-c", code],
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    for_help, without_model = (set(line.split()) for line in output.splitlines())
    assert {"redis", "rq", "rich"} & for_help == set()
    assert {"mlx", "mlx_lm", "transformers", "huggingface_hub", "numpy"} & without_model == set()


def test_the_shell_completes_options_and_their_values() -> None:
    def completed(words: str) -> str:
        return invoke(
            _OMLX_WORKER_COMPLETE="bash_complete",
            COMP_WORDS=words,
            COMP_CWORD=str(len(words.split()) - 1),
        ).stdout

    assert completed("omlx-worker run --max-b") == "plain,--max-batch\n"
    assert completed("omlx-worker run --mode h") == "plain,hybrid\n"
    source = invoke(_OMLX_WORKER_COMPLETE="bash_source")
    assert "complete -o nosort -F _omlx_worker_completion omlx-worker" in source.stdout


def read_run(*arguments: str) -> list[WorkerSettings]:
    """The settings of the models that ``omlx-worker run`` would serve."""
    context = run.make_context("omlx-worker run", [*arguments])
    return read_models([context.params, *ModelsCommand.others(context)])[0]


def test_options_after_a_model_are_its_own_and_those_before_the_first_are_for_all() -> None:
    first, second = read_run(
        *("--mode", "mtp", "--max-batch=8", "-m", "a", "--mtp-depth", "2", "--name", "mac-1"),
        *("--model=models/b", "--model-alias", "other", "--drafter", "c", "--max-batch", "4"),
    )
    assert (first.alias, first.mode, first.max_batch, first.mtp_depth) == ("a", "mtp", 8, 2)
    assert (second.alias, second.mode, second.max_batch, second.mtp_depth) == ("other", "mtp", 4, 3)
    assert (first.drafter, second.drafter) == ("head,lookup", "c")
    assert first.name == second.name == "mac-1"


def test_options_of_the_worker_may_follow_any_model() -> None:
    models = read_run("-m", "a", "-m", "b", "--redis-url", "redis://x:1", "--switch-after", "60")
    assert {model.redis_url for model in models} == {"redis://x:1"}
    assert {model.switch_after for model in models} == {60.0}


def test_options_of_a_single_model_may_go_before_it() -> None:
    [model] = read_run("--model-alias", "x", "--mtp-depth", "1", "-m", "a", "--burst")
    assert (model.alias, model.model, model.mtp_depth, model.burst) == ("x", "a", 1, True)


def test_two_models_of_one_name_are_refused() -> None:
    result = invoke("run", "-m", "one/a", "-m", "two/a")
    assert result.exit_code == INVALID
    assert "--model: got two models that are called a; give each a name" in result.stderr


@pytest.mark.parametrize("command", ["run --embedded-redis", "batch in.csv", "check", "bench"])
def test_a_model_is_asked_for_and_the_toy_must_be_named(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("OMLX_QUEUE_MODEL")
    result = invoke(*command.split())
    said = "--model: missing; give -m with a folder or a Hugging Face id, or -m demo, a toy to try"
    assert (result.exit_code, result.stderr) == (INVALID, f"omlx-worker: {said}\n")


def test_a_model_without_a_name_is_refused() -> None:
    result = invoke("run", "-m", "")
    assert result.exit_code == INVALID
    assert "--model: got ''; give a folder or a Hugging Face id, or demo to try" in result.stderr


@pytest.mark.parametrize("command", ["check", "bench"])
def test_other_commands_take_one_model(command: str) -> None:
    result = invoke(*command.split(), "-m", "a", "-m", "b")
    assert result.exit_code == INVALID
    assert "--model is given more than once; omlx-worker run alone serves several" in result.stderr
