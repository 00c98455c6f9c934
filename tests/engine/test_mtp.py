"""The MTP head survives loading, in every convention that checkpoints come in."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from omlx_worker.engine.acceptance import first_draft_acceptance
from tests.engine.checkpoints import write_qwen
from tests.engine.driving import Loaded


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


def test_a_promised_head_that_is_missing_is_a_warning_and_plain_decoding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_qwen(tmp_path)
    names = [name for name in mx.load(str(path / "model.safetensors")) if name.startswith("mtp.")]
    rewrite(path, **dict.fromkeys(names))

    with caplog.at_level(logging.WARNING):
        loaded = Loaded.at(path)

    assert loaded.network.mtp is None
    assert [r.message for r in caplog.records if "no mtp" in r.message or "mtp.*" in r.message]
    assert len(loaded.greedy([1, 2, 3], 3)) == 3


def test_a_checkpoint_that_promises_no_head_loads_without_one(tmp_path: Path) -> None:
    path = write_qwen(tmp_path, mtp_num_hidden_layers=0)
    assert "mtp.fc.weight" not in mx.load(str(path / "model.safetensors"))

    assert Loaded.at(path).network.mtp is None
    assert json.loads((path / "config.json").read_text())["text_config"]["vocab_size"] == 257


def test_the_demo_models_first_draft_is_accepted_on_heldout_prompts(
    demo: Loaded, heldout_prompts: list[str]
) -> None:
    prompts = [demo.tokenizer.encode(text) for text in heldout_prompts]

    measured = first_draft_acceptance(demo.network, prompts, tokens=64)

    assert measured.acceptance >= 0.70
    assert measured.drafts >= 60 * len(prompts) * 0.5
