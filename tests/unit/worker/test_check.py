"""``omlx-worker check`` says how this machine would serve a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import pytest
from click.testing import CliRunner, Result

from omlx_worker import cli
from omlx_worker.build import load_engine
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.pool import Pair
from omlx_worker.engine.loading import loader
from omlx_worker.mac.buffers import MEGABYTES, held_back
from omlx_worker.settings import WorkerSettings
from tests.helpers.checkpoints import (
    convert_without_head,
    write_assistant,
    write_family,
    write_llama,
    write_qwen,
)
from tests.helpers.families import SLIDING
from tests.helpers.towers import add_qwen_tower

# Float32 on a CPU, half of it on a GPU.
BYTES = 4
ONE_LAYER = 2 * 2 * 16 * BYTES
"""Keys and values of a token: two heads of 16."""


@pytest.fixture(autouse=True)
def _without_a_file_of_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(path: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.main, ["check", "-m", str(path), *options])


def checked(path: Path, *options: str) -> dict[str, Any]:
    result = check(path, *options, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("checked-llama"))


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="sizes are those of float32")
@pytest.mark.parametrize(
    ("family", "token", "sliding"),
    [
        pytest.param("llama", 4 * ONE_LAYER, 0, marks=pytest.mark.slow),
        ("gemma3", 2 * ONE_LAYER, 2 * SLIDING * ONE_LAYER),
        ("gpt_oss", 2 * ONE_LAYER, 2 * SLIDING * ONE_LAYER),
    ],
)
def test_the_bytes_of_a_row_are_those_of_its_layers(
    tmp_path: Path, family: str, token: int, sliding: int
) -> None:
    found = checked(write_family(tmp_path / family, family))

    assert found["family"] == family
    assert (found["token"], found["sliding"], found["state"]) == (token, sliding, 0)
    assert found["context"] == 4096


def test_a_head_drafts_unless_the_mode_forbids_it(tmp_path: Path, llama: Path) -> None:
    qwen = write_qwen(tmp_path / "qwen")

    said = check(qwen, "--mtp-depth", "2").stdout

    assert "drafts   up to 8 a step by head, lookup\nhead     from the checkpoint\n" in said
    assert "a token + 31 KiB a row for recurrent layers\n" in said
    assert "drafts   none: --mode batched" in check(qwen, "--mode", "batched").stdout
    assert "drafts   up to 8 a step by lookup\n" in check(llama).stdout
    assert "drafts   none: --drafter head names nothing" in check(llama, "--drafter", "head").stdout


@pytest.mark.parametrize(
    ("drafter", "drafts", "head"),
    [
        pytest.param(
            "head", "up to 3 a step by head", "from the checkpoint", marks=pytest.mark.slow
        ),
        ("lookup", "up to 8 a step by lookup", None),
        ("none", "none: --drafter none names nothing that drafts for this model", None),
    ],
)
def test_only_what_is_named_drafts(
    tmp_path: Path, drafter: str, drafts: str, head: str | None
) -> None:
    lines = check(write_qwen(tmp_path), "--drafter", drafter).stdout.splitlines()

    said = dict(line.split(maxsplit=1) for line in lines)
    assert (said["drafts"], said.get("head")) == (drafts, head)


@pytest.mark.slow
def test_it_says_where_the_head_came_from_or_how_to_get_it(tmp_path: Path, llama: Path) -> None:
    qwen = write_qwen(tmp_path / "qwen")
    copy = convert_without_head(qwen, tmp_path / "copy")
    (copy / "README.md").write_text("---\nbase_model: makers/original\n---\n")
    command = f"omlx-worker run -m {copy} --mtp-from makers/original"

    plain = check(copy).stdout
    grafted = check(copy, "--mtp-from", str(qwen)).stdout

    assert (
        f"head     the model's files have no MTP head to draft with; get it with: {command}\n"
        in plain
    )
    assert f"head     from {qwen}\n" in grafted
    assert checked(copy)["head_hint"].endswith(command)
    for model, *options in [(llama,), (copy, "--mode", "batched")]:
        found = checked(model, *options)
        assert (found["head"], found["head_hint"]) == (None, None)


def test_it_says_how_large_pictures_are_or_how_to_get_the_tower(tmp_path: Path) -> None:
    qwen = add_qwen_tower(write_qwen(tmp_path / "qwen"))
    copy = convert_without_head(qwen, tmp_path / "copy")
    command = f"omlx-worker run -m {copy} --vision-from ORIGINAL"

    plain = check(copy, "--mode", "batched").stdout
    taken = check(copy, "--mode", "batched", "--vision-from", str(qwen)).stdout
    limited = check(qwen, "--mode", "batched", "--max-pixels", "4096").stdout

    assert f"pictures the model's files have no vision tower; get it with: {command} (" in plain
    assert "pictures of up to 113 tokens each\n" in taken
    assert "pictures of up to 33 tokens each\n" in limited


@pytest.mark.slow
def test_it_names_the_assistant_that_a_model_may_have(tmp_path: Path) -> None:
    gemma = write_family(tmp_path / "gemma", "gemma4_text")
    command = f"omlx-worker run -m {gemma} --drafter"

    unknown = check(gemma).stdout
    (gemma / "README.md").write_text("---\nbase_model: google/gemma-it\n---\n")
    named = check(gemma).stdout
    drafted = checked(gemma, "--drafter", str(write_assistant(tmp_path / "assistant")))

    said = f"head     the model's family has assistants that draft; get it with: {command}"
    assert f"{said} ASSISTANT,lookup (the repository of the one for this model)\n" in unknown
    assert f"{said} google/gemma-it-assistant,lookup\n" in named
    assert drafted["head_hint"] is None


@pytest.mark.parametrize(
    "family", ["deepseek_v3", pytest.param("nemotron_h", marks=pytest.mark.slow)]
)
def test_a_head_that_is_not_run_here_is_told(tmp_path: Path, family: str) -> None:
    said = check(write_family(tmp_path, family, num_nextn_predict_layers=1)).stdout

    assert (
        f"head     the MTP head of the model's family, {family}, is not run here; "
        "a smaller model of the same vocabulary can draft: --drafter MODEL,lookup\n" in said
    )


def test_a_model_that_drafts_is_named_and_its_cache_counted(tmp_path: Path, llama: Path) -> None:
    draft = str(write_llama(tmp_path / "draft"))
    alone = checked(llama)
    both = checked(llama, "--drafter", f"{draft},lookup", "--mtp-depth", "2")

    assert (both["drafts_by"], both["draft_depth"]) == (f"{draft}, lookup", 8)
    assert (both["token"], both["weights"]) == (2 * alone["token"], 2 * alone["weights"])


def test_a_model_whose_windows_differ_from_its_forward_is_refused(llama: Path) -> None:
    put = PlainAttention.put

    def put_elsewhere(attention: PlainAttention, tails: Pair, *args: Any) -> Pair:
        put(attention, tails, *args)
        return tails

    with patch.object(PlainAttention, "put", put_elsewhere):
        result = check(llama)

    assert result.exit_code == 2
    assert "cannot be decoded in a batch, because a ragged window differs" in result.stderr


@pytest.mark.slow
def test_the_kernels_are_told_with_their_times(llama: Path) -> None:
    def fail(x: mx.array) -> mx.array:
        raise RuntimeError("no such instruction")

    contest = Contest()
    forms = {"plain": lambda x: 2 * x, "kernel": fail}
    contest.run("doubling", "8 rows, floats", forms, [mx.ones(8)])

    with patch.object(loader, "Contest", lambda *_, **__: contest):
        said, [found] = check(llama).stdout, checked(llama)["kernels"]

    assert "kernel   doubling, 8 rows, floats: plain; plain " in said
    assert "it fails: no such instruction\n" in said
    assert (found["form"], [*found["microseconds"]]) == ("plain", ["plain"])


@pytest.mark.slow
def test_what_command_buffers_hold_back_is_kept_free_of_rows(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 64 << 20
    before = checked(llama, "--memory-limit", f"{limit}B")["rows"]
    monkeypatch.setenv(MEGABYTES, "400")

    with_more = f"{limit + held_back()}B"
    assert checked(llama, "--memory-limit", with_more)["rows"] == before
    assert "buffers  MLX_MAX_MB_PER_BUFFER 400\n" in check(llama).stdout


@pytest.mark.parametrize(
    ("family", "slow"),
    [
        ("llama", ""),
        ("lfm2", "prompts of different lengths are read one after the other, because recurrent"),
        ("deepseek_v3", "latent attention runs as plain operations"),
    ],
)
def test_what_runs_without_its_fast_form_is_told_and_logged(
    tmp_path: Path, family: str, slow: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = check(write_family(tmp_path / family, family)).stdout

    assert (f"slow     {slow}" in said) == bool(slow)
    assert (f"slow: {slow}" in caplog.text) == bool(slow)


def test_the_rows_are_as_many_as_a_worker_admits(llama: Path) -> None:
    limit = 12 << 20
    rows = checked(llama, "--memory-limit", str(limit))["rows"]

    engine = load_engine(WorkerSettings(model=str(llama)))
    memory = MemoryBudget(limit, engine.weight_bytes, engine.bytes_for)
    assert rows > 1
    assert memory.fits([(1024, 1024), *[(0, 1024)] * (rows - 1)])
    assert not memory.fits([(1024, 1024), *[(0, 1024)] * rows])


def test_a_folder_that_is_no_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    result = check(tmp_path)

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "no checkpoint, for it has no config.json" in result.stderr


def test_a_folder_may_have_a_name_that_no_request_could_give(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    assert "no checkpoint, for it has no config.json" in check(folder).stderr
