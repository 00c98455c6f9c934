"""``--mtp-from`` gives a model the head of its original, which is wanted only once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from omlx_worker import cli
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.graft import Graft
from omlx_worker.engine.loading.loader import classes_with_head, load, load_engine
from omlx_worker.engine.rows.interface import ModelError
from tests.helpers.acceptance import first_draft_acceptance
from tests.helpers.checkpoints import (
    convert_with_head,
    convert_without_head,
    shard,
    write_llama,
    write_qwen,
    write_qwen_moe,
    write_qwen_next,
)
from tests.helpers.decoding import Loaded, row, run
from tests.helpers.hub import Hub

NAME = "makers/original"
HEAD_SHARD = "model-00003-of-00003.safetensors"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw Qwen3.5 in shards, its head in the last one."""
    return shard(write_qwen(tmp_path_factory.mktemp("original")))


@pytest.fixture(scope="module")
def copy(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mlx-lm makes of it at 4 bits."""
    return convert_without_head(original, tmp_path_factory.mktemp("copies") / "copy", 4)


def head_of(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.mtp.parameters()))


def grafted(copy: Path, original: Path | str, state: Path) -> nn.Module:
    network, _, _ = load(copy, graft=Graft(str(original), state))
    return network


def refusal(copy: Path, original: Path | str, state: Path) -> str:
    """The sentence that a graft ends with, which leaves nothing behind."""
    with pytest.raises(ModelError) as refused:
        grafted(copy, original, state)
    assert not (state / "heads").exists() or list((state / "heads").iterdir()) == []
    sentence = str(refused.value)
    assert sentence.startswith(f"--mtp-from {original}: ")
    assert "\n" not in sentence
    return sentence


def assert_alike(got: dict[str, mx.array], wanted: dict[str, mx.array]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in got if not mx.array_equal(got[name], wanted[name]).item()] == []


@pytest.mark.parametrize("write", [write_qwen, write_qwen_moe, write_qwen_next])
def test_a_grafted_head_is_the_originals(
    tmp_path: Path, state: Path, write: Callable[..., Path]
) -> None:
    original = shard(write(tmp_path / "original"))
    copy = convert_without_head(original, tmp_path / "copy")
    assert load(copy)[0].mtp is None

    head = head_of(grafted(copy, original, state))

    assert_alike(head, head_of(load(original)[0]))


def test_raw_norms_are_shifted_whatever_they_look_like(tmp_path: Path, state: Path) -> None:
    """Norms of training may be near 1 minus one, where nothing but the file's format tells."""
    original = write_qwen(tmp_path / "original")
    weights = mx.load(str(original / "model.safetensors"))
    mx.eval(weights)
    norms = [name for name in weights if name.startswith("mtp.") and "norm" in name]
    weights |= {name: weights[name] + 0.9 for name in norms}
    mx.save_safetensors(str(original / "model.safetensors"), weights, {"format": "pt"})
    copy = convert_without_head(original, tmp_path / "copy")

    assert_alike(head_of(grafted(copy, original, state)), head_of(load(original)[0]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("write", [write_qwen_moe, write_qwen_next])
def test_it_is_quantised_as_the_models_layers_are_but_for_its_mixing_matrix(
    tmp_path: Path, state: Path, write: Callable[..., Path], bits: int
) -> None:
    original = shard(write(tmp_path / "original"))
    copy = convert_without_head(original, tmp_path / "copy", bits)
    network, _ = load_model(original, get_model_classes=classes_with_head)
    chosen = getattr(network, "quant_predicate", None) or (lambda *_: True)

    def quantised(path: str, module: nn.Module) -> bool | dict[str, Any]:
        return path != "mtp.fc" and hasattr(module, "to_quantized") and chosen(path, module)

    nn.quantize(network, 32, bits, class_predicate=quantised)
    network.set_dtype(mx.float32)

    head = head_of(grafted(copy, original, state))

    assert_alike(head, head_of(network))


def test_a_graft_from_a_conversion_takes_the_norms_as_they_are(
    original: Path, tmp_path: Path, state: Path
) -> None:
    converted = convert_with_head(original, tmp_path / "converted")
    copy = convert_without_head(original, tmp_path / "copy")

    assert_alike(head_of(grafted(copy, converted, state)), head_of(load(original)[0]))


def test_the_text_is_the_models_with_and_without_the_graft(
    original: Path, tmp_path: Path, state: Path
) -> None:
    copy = convert_without_head(original, tmp_path / "copy")
    network, tokenizer, config = load(copy, graft=Graft(str(original), state))
    loaded = Loaded(network, tokenizer, config)

    got = run(loaded.decoder(2), [row("row", [1, 2, 3, 4, 5], 16)])

    assert got["row"] == Loaded.at(copy).greedy([1, 2, 3, 4, 5], 16)


def test_only_the_shard_with_the_head_is_downloaded(
    hub: Hub, original: Path, copy: Path, state: Path
) -> None:
    hub.repositories[NAME] = original

    head = head_of(grafted(copy, NAME, state))

    assert hub.weights_served == [HEAD_SHARD]
    assert_alike(head, head_of(grafted(copy, original, state)))


def test_the_next_start_needs_neither_the_network_nor_the_original(
    hub: Hub, original: Path, copy: Path, tmp_path: Path, state: Path
) -> None:
    hub.repositories[NAME] = original
    folder = shutil.copytree(original, tmp_path / "original")
    heads = [head_of(grafted(copy, source, state)) for source in (NAME, folder)]
    hub.repositories.clear()
    hub.requests = 0
    shutil.rmtree(tmp_path / "hub-cache")
    shutil.rmtree(folder)

    again = [head_of(grafted(copy, source, state)) for source in (NAME, folder)]

    assert hub.requests == 0
    for before, after in zip(heads, again, strict=True):
        assert_alike(after, before)


def test_a_folder_that_has_changed_is_read_again(
    copy: Path, original: Path, tmp_path: Path, state: Path
) -> None:
    folder = shutil.copytree(original, tmp_path / "original")
    before = head_of(grafted(copy, folder, state))
    shutil.rmtree(folder)
    shard(write_qwen(folder, seed=1))

    after = head_of(grafted(copy, folder, state))

    assert not mx.array_equal(after["fc.weight"], before["fc.weight"]).item()


def test_another_model_gets_a_head_of_its_own(
    copy: Path, original: Path, tmp_path: Path, state: Path
) -> None:
    grafted(copy, original, state)

    network = grafted(convert_without_head(original, tmp_path / "8", 8), original, state)

    assert network.mtp.layers[0].mlp.up_proj.bits == 8
    assert len(list((state / "heads").iterdir())) == 2


def test_a_kept_head_that_is_spoiled_is_made_anew(
    copy: Path, original: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = head_of(grafted(copy, original, state))
    [file] = (state / "heads").iterdir()
    file.write_bytes(file.read_bytes()[:20_000])

    after = head_of(grafted(copy, original, state))

    assert_alike(after, before)
    assert [r.message for r in caplog.records if "made anew" in r.message]


def test_an_original_of_another_family_is_refused(copy: Path, tmp_path: Path, state: Path) -> None:
    llama = write_llama(tmp_path / "llama")

    assert "its family is llama, and the model's is qwen3_5;" in refusal(copy, llama, state)
    assert "leave it out" in refusal(llama, copy, state)


def test_an_original_of_another_size_is_refused(copy: Path, tmp_path: Path, state: Path) -> None:
    other = write_qwen(tmp_path / "other", intermediate_size=128)

    said = "its intermediate_size is 128, and the model's is 96;"
    assert said in refusal(copy, other, state)


def test_an_original_with_other_tokens_is_refused(
    copy: Path, original: Path, tmp_path: Path, state: Path
) -> None:
    other = shutil.copytree(original, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {t: len(vocabulary) - 1 - i for t, i in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))

    assert "its tokens have other ids than the model's" in refusal(copy, other, state)


def test_an_original_without_a_head_or_with_a_quantised_one_is_refused(
    copy: Path, original: Path, tmp_path: Path, state: Path
) -> None:
    quantised = convert_with_head(original, tmp_path / "quantised", 4)

    assert "it has no MTP head" in refusal(copy, copy, state)
    assert "its MTP head is quantised" in refusal(copy, quantised, state)


def test_a_shard_that_is_missing_or_cut_short_is_named(
    copy: Path, original: Path, tmp_path: Path, state: Path
) -> None:
    spoiled = shutil.copytree(original, tmp_path / "spoiled")
    (spoiled / HEAD_SHARD).write_bytes((spoiled / HEAD_SHARD).read_bytes()[:50_000])

    assert f"{HEAD_SHARD} is incomplete;" in refusal(copy, spoiled, state)
    (spoiled / HEAD_SHARD).unlink()
    assert f"{HEAD_SHARD} is missing" in refusal(copy, spoiled, state)


@pytest.mark.slow
def test_a_download_that_fails_is_one_sentence_and_the_next_start_goes_on(
    hub: Hub, original: Path, copy: Path, state: Path
) -> None:
    hub.repositories[NAME] = original
    hub.cut[HEAD_SHARD] = 9

    assert "could not be downloaded" in refusal(copy, NAME, state)
    hub.cut.clear()
    assert grafted(copy, NAME, state).mtp is not None


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    hub: Hub, copy: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")

    assert refusal(copy, NAME, state).endswith("check the name and the network")


def test_a_state_folder_that_cannot_be_written_is_named(
    original: Path, copy: Path, state: Path
) -> None:
    state.touch()

    with pytest.raises(ModelError, match=f"the head cannot be kept in {state}/heads"):
        grafted(copy, original, state)


def hint(model: Path | str) -> str | None:
    return load_engine(str(model), max_rows=1, depth=1).head_hint


@pytest.mark.parametrize("named", [NAME, f'"{NAME}"', f"\n  - {NAME}\n  - makers/another"])
def test_a_copy_without_its_head_says_the_command_that_gets_it(
    hub: Hub, copy: Path, tmp_path: Path, named: str
) -> None:
    """Its card names the original, also where the copy is a repository."""
    copy = shutil.copytree(copy, tmp_path / "a copy")
    (copy / "README.md").write_text(f"---\nlicense: mit\nbase_model: {named}\ntags: []\n---\n")
    hub.repositories["community/copy"] = copy
    said = "the model's files have no MTP head to draft with; get it with: omlx-worker run -m "

    assert hint(copy) == f"{said}'{copy}' --mtp-from {NAME}"
    assert hint("community/copy") == f"{said}community/copy --mtp-from {NAME}"


def test_without_a_card_the_command_says_what_to_put_in(hub: Hub, copy: Path) -> None:
    hub.repositories["community/copy"] = copy
    (copy / "README.md").unlink()

    for model in (copy, "community/copy"):
        said = hint(model)
        assert said is not None
        assert said.endswith(
            f"omlx-worker run -m {model} --mtp-from ORIGINAL "
            "(ORIGINAL is the repository that the model was converted from)"
        )


def test_a_model_that_lacks_nothing_gets_no_hint(
    copy: Path, original: Path, llama_path: Path, state: Path
) -> None:
    graft = Graft(str(original), state)

    assert hint(original) is None
    assert hint(llama_path) is None
    assert load_engine(str(copy), max_rows=1, depth=1, graft=graft).head_hint is None
    assert load_engine(str(copy), max_rows=1, depth=0).head_hint is None


def check(*options: str) -> Result:
    return CliRunner().invoke(cli.main, ["check", *options])


@pytest.mark.slow
def test_check_and_bench_take_the_option(
    original: Path, copy: Path, tmp_path: Path, state: Path
) -> None:
    options = ["-m", str(copy), "--mtp-from", str(original), "--state-dir", str(state)]

    checked = check(*options, "--json")
    report = tmp_path / "report.json"
    quick = ["--rows", "1", "--depths", "2", "--context", "8", "--tokens", "3", "--laps", "1"]
    measured = CliRunner().invoke(cli.main, ["bench", *options, *quick, "--json", str(report)])

    assert json.loads(checked.stdout)["drafts_by"] == "head, lookup"
    assert measured.exit_code == 0, measured.output
    assert "K=2" in [figures["side"] for figures in json.loads(report.read_text())["decoding"]]


def test_a_mode_without_drafts_takes_no_head(copy: Path) -> None:
    checked = check("-m", str(copy), "--mtp-from", "/nowhere", "--mode", "batched")

    assert checked.exit_code == 0, checked.output


def test_a_head_that_would_not_draft_is_one_too_many() -> None:
    both = ["-m", "demo", "--drafter", "demo", "--mtp-from", "demo"]

    for command in ("check", "run", "bench"):
        refused = CliRunner().invoke(cli.main, [command, *both])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert refused.stderr.startswith("omlx-worker: --mtp-from: ")
        assert "no head drafts with --drafter demo; leave one of the two out" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_the_demo_models_grafted_head_drafts_as_its_own(
    demo: Loaded, heldout_prompts: list[str], tmp_path: Path, state: Path, bits: int | None
) -> None:
    """Quantised, it is compared with the exact head beside the same quantised backbone."""
    prompts = [demo.tokenizer.encode(text)[-32:] for text in heldout_prompts[::20]]
    copy = convert_without_head(resolve(DEMO), tmp_path / "copy", bits)
    network = grafted(copy, DEMO, state)

    measured = first_draft_acceptance(network, prompts, 32)
    network.mtp = demo.network.mtp
    exact = first_draft_acceptance(network, prompts, 32)

    assert measured.drafts == exact.drafts == 31 * len(prompts)
    difference = 100 * abs(measured.acceptance - exact.acceptance)
    assert difference <= (2 if bits else 0)
    assert exact.acceptance > 0.5
