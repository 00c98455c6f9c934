"""The MTP head survives loading, in every convention that checkpoints come in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config, save_model

from omlx_worker.engine.models.mtp import promises_head
from tests.helpers.acceptance import first_draft_acceptance
from tests.helpers.checkpoints import (
    split_experts,
    write_qwen,
    write_qwen_moe,
    write_qwen_next,
    write_tokenizer,
)
from tests.helpers.decoding import Loaded, row, run

PROMPTS = ([1, 2, 3, 4, 5], [7] * 20)


def head_of(loaded: Loaded) -> dict[str, mx.array]:
    return dict(tree_flatten(loaded.network.mtp.parameters()))


def rewrite(path: Path, **changes: mx.array | None) -> None:
    """Replace tensors of a checkpoint, or drop those given as None."""
    file = path / "model.safetensors"
    weights = mx.load(str(file))
    mx.eval(weights)
    for name, value in changes.items():
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    mx.save_safetensors(str(file), weights)


def quantise(path: Path, to: Path, bits: int, kept: Collection[str] = ()) -> Path:
    """Convert a checkpoint as mlx-lm does, its head quantised too, modules in ``kept`` apart."""
    loaded = Loaded.at(path)
    network, config = quantize_model(
        loaded.network, loaded.config, 32, bits, quant_predicate=lambda name, _: name not in kept
    )
    save_model(to, network)
    save_config(config, to / "config.json")
    write_tokenizer(to)
    return to


def assert_decodes_losslessly(loaded: Loaded, depth: int = 2) -> None:
    rows = [row(str(index), prompt, 16) for index, prompt in enumerate(PROMPTS)]

    got = run(loaded.decoder(depth), rows)

    assert [got[r.row_id] for r in rows] == [loaded.greedy(prompt, 16) for prompt in PROMPTS]


def test_a_raw_checkpoints_head_norms_are_shifted_with_the_backbones(tmp_path: Path) -> None:
    path = write_qwen(tmp_path)
    raw = mx.load(str(path / "model.safetensors"))

    head = head_of(Loaded.at(path))

    for name in ("norm.weight", "layers.0.self_attn.q_norm.weight", "pre_fc_norm_hidden.weight"):
        assert mx.allclose(head[name], raw[f"mtp.{name}"] + 1).item()
    assert mx.array_equal(head["fc.weight"], raw["mtp.fc.weight"]).item()


@pytest.mark.parametrize("converted_head", [True, False])
def test_a_converted_backbone_takes_a_converted_or_a_raw_head(
    tmp_path: Path, converted_head: bool
) -> None:
    path = write_qwen(tmp_path)
    raw = mx.load(str(path / "model.safetensors"))
    mx.eval(raw)
    changes = {}
    for name, value in raw.items():
        shifted = "norm" in name and value.ndim == 1 and "linear_attn.norm" not in name
        if "conv1d" in name:
            changes[name] = value.moveaxis(2, 1)
        elif shifted and (converted_head or "mtp." not in name):
            changes[name] = value + 1
    rewrite(path, **changes)

    head = head_of(Loaded.at(path))

    assert mx.allclose(head["norm.weight"], raw["mtp.norm.weight"] + 1).item()


@pytest.mark.parametrize(
    ("write", "tied"),
    [
        *((write_qwen, True), (write_qwen_moe, False), (write_qwen_next, True)),
        pytest.param(write_qwen, False, marks=pytest.mark.slow),
        pytest.param(write_qwen_moe, True, marks=pytest.mark.slow),
        pytest.param(write_qwen_next, False, marks=pytest.mark.slow),
    ],
)
def test_every_family_drafts_losslessly_from_a_raw_checkpoint(
    tmp_path: Path, write: Callable[..., Path], tied: bool
) -> None:
    loaded = Loaded.at(write(tmp_path, tie_word_embeddings=tied))

    assert loaded.network.mtp is not None
    assert_decodes_losslessly(loaded)


@pytest.mark.parametrize(
    ("write", "bits", "kept"),
    [
        pytest.param(write_qwen, 4, (), marks=pytest.mark.slow),
        pytest.param(write_qwen, 8, ("mtp.fc",), marks=pytest.mark.slow),
        (write_qwen_moe, 4, ("mtp.fc",)),
        (write_qwen_next, 8, ()),
    ],
)
def test_a_quantised_head_drafts_losslessly_with_or_without_its_mixing_matrix(
    tmp_path: Path, write: Callable[..., Path], bits: int, kept: Collection[str]
) -> None:
    loaded = Loaded.at(quantise(write(tmp_path / "raw"), tmp_path / "quantised", bits, kept))

    head = loaded.network.mtp
    assert isinstance(head.fc, nn.Linear if kept else nn.QuantizedLinear)
    assert head.layers[0].self_attn.q_proj.bits == bits
    assert_decodes_losslessly(loaded)


def test_a_raw_head_beside_a_quantised_backbone_stays_as_it_is(tmp_path: Path) -> None:
    path = write_qwen_moe(tmp_path / "raw")
    raw = mx.load(str(path / "model.safetensors"))
    quantised = quantise(path, tmp_path / "quantised", 4)
    converted = [n for n in mx.load(str(quantised / "model.safetensors")) if n.startswith("mtp.")]
    head = {name: value for name, value in raw.items() if name.startswith("mtp.")}
    rewrite(quantised, **dict.fromkeys(converted) | head)

    loaded = Loaded.at(quantised)

    assert isinstance(loaded.network.language_model.layers[0].mlp.gate, nn.QuantizedLinear)
    expected, got = head_of(Loaded.at(path)), head_of(loaded)
    assert expected.keys() == got.keys()
    assert all(mx.array_equal(expected[name], got[name]).item() for name in got)


@pytest.mark.slow
def test_a_bfloat16_head_keeps_its_precision(tmp_path: Path) -> None:
    path = write_qwen(tmp_path)
    raw = mx.load(str(path / "model.safetensors"))
    rewrite(path, **{name: value.astype(mx.bfloat16) for name, value in raw.items()})
    loaded = Loaded.at(path)
    # A CPU computes in float32; what a GPU would do is what this does.
    loaded.network.set_dtype(mx.bfloat16)

    got = run(loaded.decoder(2), [row("only", PROMPTS[0], 16)])

    assert {value.dtype for value in head_of(loaded).values()} == {mx.bfloat16}
    assert len(got["only"]) == 16


def test_experts_of_a_head_load_alike_fused_and_apart(tmp_path: Path) -> None:
    fused = write_qwen_moe(tmp_path / "fused")
    apart = write_qwen_moe(tmp_path / "apart")
    loaded = Loaded.at(fused)
    stacked = {f"mtp.{name}": value for name, value in head_of(loaded).items() if "switch" in name}
    experts = [name for name in mx.load(str(apart / "model.safetensors")) if ".experts." in name]
    rewrite(
        apart,
        **dict.fromkeys(name for name in experts if name.startswith("mtp.")),
        **split_experts(stacked),
    )

    got = head_of(Loaded.at(apart))

    for name, value in head_of(loaded).items():
        assert mx.array_equal(got[name], value).item(), name


def test_a_vision_tower_is_skipped(tmp_path: Path) -> None:
    path = write_qwen_moe(tmp_path)
    rewrite(path, **{"model.visual.blocks.0.attn.qkv.weight": mx.ones((96, 32))})

    loaded = Loaded.at(path)

    assert loaded.network.mtp is not None
    assert not [name for name, _ in tree_flatten(loaded.network.parameters()) if "visual" in name]


def assert_plain_after_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture, saying: str
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = Loaded.at(path)

    (warning,) = [r.message for r in caplog.records if "MTP head" in r.message]
    assert saying in warning
    assert loaded.network.mtp is None
    assert not loaded.decoder(2).max_depth
    assert len(loaded.greedy([1, 2, 3], 3)) == 3


@pytest.mark.parametrize(
    ("changes", "saying"),
    [
        ({"mtp.fc.weight": None}, "mtp.fc.weight is missing"),
        ({"mtp.norm.weight": mx.ones((65,))}, "mtp.norm.weight has shape (65,)"),
        ({"mtp.layers.1.input_layernorm.weight": mx.ones((64,))}, "has no place in it"),
        ({"mtp.fc.scales": mx.ones((64, 4))}, "mtp.fc.biases is missing"),
        (
            {"mtp.layers.0.mlp.experts.2.up_proj.weight": None},
            "mtp.layers.0.mlp.switch_mlp.up_proj.weight has shape (3, 32, 64)",
        ),
    ],
)
def test_a_head_that_is_incomplete_or_odd_is_a_warning_and_plain_decoding(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, mx.array | None],
    saying: str,
) -> None:
    path = write_qwen_next(tmp_path)
    rewrite(path, **changes)

    assert_plain_after_one_warning(path, caplog, saying)


def test_a_checkpoint_that_neither_promises_nor_has_a_head_loads_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_qwen(tmp_path, mtp_num_hidden_layers=0)
    assert "mtp.fc.weight" not in mx.load(str(path / "model.safetensors"))

    with caplog.at_level(logging.WARNING):
        assert Loaded.at(path).network.mtp is None

    assert not caplog.records


def test_a_head_that_the_configuration_does_not_mention_is_used(tmp_path: Path) -> None:
    path = write_qwen(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["text_config"]["mtp_num_hidden_layers"]
    (path / "config.json").write_text(json.dumps(config))

    assert Loaded.at(path).decoder(2).max_depth == 2


@pytest.mark.slow
def test_the_demo_models_first_draft_is_accepted_on_heldout_prompts(
    demo: Loaded, heldout_prompts: list[str]
) -> None:
    # A tenth of them; scripts.demo_model.train --evaluate measures all.
    prompts = [demo.tokenizer.encode(text) for text in heldout_prompts[::10]]

    measured = first_draft_acceptance(demo.network, prompts, tokens=64)

    assert measured.drafts == 63 * len(prompts)
    assert measured.acceptance >= 0.70


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_5", "text_config": {"mtp_num_hidden_layers": 1}},
        {"model_type": "step3p5", "num_nextn_predict_layers": 3},
        {"model_type": "deepseek_v3", "num_mtp_layers": 1},
        {"model_type": "mimo_v2_flash"},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_configuration_speaks_of_a_head(config: dict[str, Any]) -> None:
    assert promises_head(config)
    assert not promises_head({"model_type": "llama", "num_nextn_predict_layers": 0})
