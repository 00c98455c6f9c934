"""A family with a form of its own is compared with mlx-lm's forward, like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest

from omlx_worker.engine.kernels.cpu.delta_rule import ProductRule
from omlx_worker.engine.models.any_family import Unsupported
from omlx_worker.engine.models.families import as_ragged
from omlx_worker.engine.models.qwen3_5 import RaggedQwen35
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import Loaded

on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.cpu, reason="plants a fault in the CPU's rule"
)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    path: Path = tmp_path_factory.mktemp("qwen")
    return Loaded.at(write_qwen(path)).network


def test_the_form_of_its_own_agrees_with_mlx_lms_forward(network: nn.Module) -> None:
    ragged = as_ragged(network)

    assert isinstance(ragged, RaggedQwen35)
    assert ragged.pads


@on_cpu
def test_a_rule_that_forgets_accepted_drafts_is_refused(network: nn.Module) -> None:
    replay = ProductRule.replay_and_run

    def forgets(rule: Any, window: Any, kept: Any, accepted: Any, state: Any) -> Any:
        return replay(rule, window, kept, mx.zeros_like(accepted), state)

    planted = patch.object(ProductRule, "replay_and_run", forgets)
    with planted, pytest.raises(Unsupported, match="differs from a plain forward"):
        as_ragged(network)
