"""A family with layers of its own form is compared with mlx-lm's forward, like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_worker.engine.kernels.compiling import unfused
from omlx_worker.engine.kernels.cpu.delta_rule import ProductRule
from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.loader import load
from omlx_worker.engine.loading.self_check import difference
from omlx_worker.engine.models.ragged_model import Unsupported
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import Loaded

on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="plants a fault in the CPU's rule"
)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    path: Path = tmp_path_factory.mktemp("qwen")
    return Loaded.at(write_qwen(path)).network


def test_the_layers_of_its_own_form_agree_with_mlx_lms_forward(network: nn.Module) -> None:
    ragged = as_ragged(network)

    assert ragged.pads
    assert not ragged.slow_parts


@pytest.mark.slow
def test_what_a_deep_network_makes_of_rounding_is_no_fault(tmp_path: Path) -> None:
    network = Loaded.at(write_qwen(tmp_path, num_hidden_layers=16)).network
    nn.quantize(network, group_size=32, bits=4)
    network.set_dtype(mx.bfloat16)
    ragged = as_ragged(network, checks=False)

    with unfused():
        assert difference(network, ragged) > 0.05
    as_ragged(network)


@on_cpu
@pytest.mark.parametrize("dtype", [pytest.param(mx.float32, marks=pytest.mark.slow), mx.bfloat16])
def test_a_rule_that_forgets_accepted_drafts_is_refused(dtype: mx.Dtype) -> None:
    network, _, _ = load(resolve(DEMO))
    network.set_dtype(dtype)
    replay = ProductRule.replay_and_run

    def forgets(rule: Any, window: Any, kept: Any, accepted: Any, state: Any) -> Any:
        return replay(rule, window, kept, mx.zeros_like(accepted), state)

    planted = patch.object(ProductRule, "replay_and_run", forgets)
    with planted, pytest.raises(Unsupported, match="differs from a plain forward"):
        as_ragged(network)
