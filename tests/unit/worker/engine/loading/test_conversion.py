"""``omlx-worker convert`` makes mlx-lm's conversion of a checkpoint and keeps its head."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten

from omlx_worker import cli
from omlx_worker.engine.loading import conversion
from omlx_worker.engine.loading.checkpoint import DEMO
from tests.helpers.acceptance import first_draft_acceptance
from tests.helpers.checkpoints import (
    convert_without_head,
    shard,
    write_llama,
    write_qwen,
    write_qwen_moe,
    write_qwen_next,
)
from tests.helpers.decoding import Loaded
from tests.helpers.hub import Hub

NAME = "makers/original"


def convert(original: Path | str, to: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.main, ["convert", str(original), "-o", str(to), *options])


def converted(original: Path | str, to: Path, *options: str) -> Path:
    result = convert(original, to, *options)
    assert result.exit_code == 0, result.output
    return to


def refusal(original: Path | str, to: Path, *options: str) -> str:
    """The sentence that a conversion ends with, which leaves nothing behind."""
    before = sorted(to.parent.iterdir())
    result = convert(original, to, *options)
    assert result.exit_code == 2, result.output
    assert sorted(path for path in to.parent.iterdir() if path.name != "hub-cache") == before
    *said, sentence = result.stderr.splitlines()
    assert len(said) <= 1, "what it needs, at most"
    return sentence


def parameters(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def assert_alike(got: dict[str, mx.array], wanted: dict[str, mx.array]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in got if not mx.array_equal(got[name], wanted[name]).item()] == []


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw Qwen3.5 in shards, its head in the last one."""
    return shard(write_qwen(tmp_path_factory.mktemp("original")))


@pytest.mark.parametrize("write", [write_qwen, write_qwen_moe, write_qwen_next])
def test_a_conversion_loads_like_its_original(tmp_path: Path, write: Callable[..., Path]) -> None:
    raw = shard(write(tmp_path / "raw"))

    path = converted(raw, tmp_path / "converted")

    assert_alike(parameters(Loaded.at(path).network), parameters(Loaded.at(raw).network))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("write", [write_qwen_moe, write_qwen_next])
def test_its_backbone_is_mlx_lms_and_its_head_is_quantised_alike(
    tmp_path: Path, write: Callable[..., Path], bits: int
) -> None:
    raw = shard(write(tmp_path / "raw"))

    path = converted(raw, tmp_path / "ours", "--bits", str(bits), "--group-size", "32")

    loaded = Loaded.at(path)
    head = parameters(loaded.network.mtp)
    ours = {k: v for k, v in parameters(loaded.network).items() if not k.startswith("mtp.")}
    theirs = Loaded.at(convert_without_head(raw, tmp_path / "theirs", bits)).network
    assert_alike(ours, parameters(theirs))
    assert isinstance(loaded.network.mtp.fc, nn.Linear)
    layer = loaded.network.mtp.layers[0]
    assert (layer.self_attn.q_proj.bits, layer.mlp.switch_mlp.up_proj.bits) == (bits, bits)
    assert layer.mlp.gate.bits == 8, "mlx-lm's own choice for this layer"
    exact = parameters(Loaded.at(raw).network.mtp)
    assert_alike({"fc": head["fc.weight"]}, {"fc": exact["fc.weight"]})


def test_what_is_not_quantised_has_the_precision_asked_for(original: Path, tmp_path: Path) -> None:
    path = converted(original, tmp_path / "half", "--bits", "8", "--dtype", "bfloat16")

    weights = mx.load(str(path / "model.safetensors"))

    assert weights["mtp.fc.weight"].dtype == mx.bfloat16
    assert weights["mtp.norm.weight"].dtype == mx.bfloat16
    assert weights["mtp.layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    assert weights["language_model.model.layers.0.linear_attn.A_log"].dtype == mx.float32


def test_the_needs_are_said_before_and_the_next_command_after(
    original: Path, tmp_path: Path
) -> None:
    result = convert(original, tmp_path / "new one", "--bits", "4")

    needs, _, done = result.stderr.splitlines()
    assert needs.startswith("omlx-worker: writes about ")
    assert " and takes about " in needs
    assert "its MTP head included" in done
    assert result.stdout == f"omlx-worker run -m '{tmp_path}/new one'\n"


def test_a_repository_is_downloaded_once_and_named_in_the_card(
    hub: Hub, original: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = original

    result = convert(NAME, tmp_path / "first")
    converted(NAME, tmp_path / "second", "--bits", "4")

    assert result.exit_code == 0, result.output
    assert "omlx-worker: downloads " in result.stderr
    assert len(hub.weights_served) == 3
    assert f"base_model: {NAME}" in (tmp_path / "first" / "README.md").read_text()
    assert Loaded.at(tmp_path / "second").network.mtp is not None


@pytest.mark.slow
def test_half_a_download_is_one_sentence_and_what_is_whole_is_kept(
    hub: Hub, original: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = original
    last = "model-00003-of-00003.safetensors"
    hub.cut[last] = 9

    assert f"ORIGINAL {NAME}: could not be downloaded" in refusal(NAME, tmp_path / "new")
    hub.cut.clear()
    hub.served.clear()
    converted(NAME, tmp_path / "new")

    assert hub.weights_served == [last]


@pytest.mark.slow
def test_a_connection_that_breaks_goes_on_where_it_stopped(
    hub: Hub, original: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = original
    last = "model-00003-of-00003.safetensors"
    hub.cut[last] = 1

    converted(NAME, tmp_path / "new")

    whole, rest = [start for name, start in hub.served if name == last]
    assert whole == 0 < rest


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")

    sentence = refusal(NAME, tmp_path / "new")

    assert sentence.startswith(f"omlx-worker: ORIGINAL {NAME}: could not be downloaded (")
    assert sentence.endswith("check the name and the network")


def test_a_repository_that_does_not_exist_is_one_sentence(hub: Hub, tmp_path: Path) -> None:
    assert f"ORIGINAL {NAME}: could not be downloaded (404" in refusal(NAME, tmp_path / "new")


@pytest.mark.parametrize("size", [None, 4, 5_000])
def test_a_shard_that_is_missing_or_cut_short_is_named(
    original: Path, tmp_path: Path, size: int | None
) -> None:
    spoiled = shutil.copytree(original, tmp_path / "spoiled")
    name = "model-00002-of-00003.safetensors"
    data = (spoiled / name).read_bytes()
    (spoiled / name).unlink()
    if size is not None:
        (spoiled / name).write_bytes(data[:size])

    sentence = refusal(spoiled, tmp_path / "new")

    assert f"{name} is {'missing' if size is None else 'incomplete'}" in sentence


def test_a_shard_that_the_repository_lacks_is_named(
    hub: Hub, original: Path, tmp_path: Path
) -> None:
    hub.repositories[NAME] = shutil.copytree(original, tmp_path / "spoiled")
    name = "model-00002-of-00003.safetensors"
    (tmp_path / "spoiled" / name).unlink()

    assert f"ORIGINAL {NAME}: {name} is missing" in refusal(NAME, tmp_path / "new")


def test_another_family_is_refused_before_its_weights_are_downloaded(
    hub: Hub, tmp_path: Path
) -> None:
    hub.repositories[NAME] = write_llama(tmp_path / "llama")

    sentence = refusal(NAME, tmp_path / "new")

    assert f"ORIGINAL {NAME}: its family, llama, has no MTP head" in sentence
    assert hub.weights_served == []


@pytest.mark.parametrize(("bits", "said"), [(None, "no MTP head"), (4, "quantised already")])
def test_a_copy_that_was_converted_is_no_original(
    original: Path, tmp_path: Path, bits: int | None, said: str
) -> None:
    copy = convert_without_head(original, tmp_path / "copy", bits)

    assert said in refusal(copy, tmp_path / "new")


def test_a_head_that_is_incomplete_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    raw = write_qwen(tmp_path / "raw")
    weights = mx.load(str(raw / "model.safetensors"))
    mx.eval(weights)
    del weights["mtp.fc.weight"]
    mx.save_safetensors(str(raw / "model.safetensors"), weights)

    assert "(mtp.fc.weight is missing)" in refusal(raw, tmp_path / "new")


@pytest.mark.parametrize(
    ("to", "options", "said"),
    [
        (".", (), "exists already"),
        ("no/new", (), "there is no folder "),
        ("new", ("--group-size", "32"), "--group-size: got 32, but no --bits"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(
    original: Path, tmp_path: Path, to: str, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "no").touch()
    result = convert(original, tmp_path / to, *options)

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_disk_without_room_is_told_before_the_work(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda _: usage._replace(free=1000))

    sentence = refusal(original, tmp_path / "new")

    assert f"are needed on the disk of {tmp_path}, and 1000 B are free" in sentence


def test_an_interrupted_conversion_leaves_nothing(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conversion.save

    def interrupted(*arguments: Any) -> None:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "save", interrupted)
    result = convert(original, tmp_path / "new")

    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == f"omlx-worker: interrupted; {tmp_path}/new is not made"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_demo_models_head_drafts_as_before(
    demo: Loaded, heldout_prompts: list[str], tmp_path: Path, bits: int | None
) -> None:
    """Quantised, it is compared with the exact head beside the same quantised backbone."""
    prompts = [demo.tokenizer.encode(text)[-32:] for text in heldout_prompts[::20]]
    options = ("--bits", str(bits)) if bits else ("--dtype", "float32")
    ours = Loaded.at(converted(DEMO, tmp_path / "ours", *options)).network

    measured = first_draft_acceptance(ours, prompts, 32)
    ours.mtp = demo.network.mtp
    exact = first_draft_acceptance(ours, prompts, 32)

    assert measured.drafts == exact.drafts == 31 * len(prompts)
    difference = 100 * abs(measured.acceptance - exact.acceptance)
    assert difference <= (2 if bits else 0)
    assert exact.acceptance > 0.5
