"""A model whose parts compete decodes what mlx-lm does, whichever form wins."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels import trial
from omlx_worker.engine.kernels.attention import Attention
from omlx_worker.engine.kernels.attention_kernel import AttentionKernel
from omlx_worker.engine.kernels.contest import Contest
from omlx_worker.engine.kernels.contested import ATTENTION, NET, RULE, Contested
from omlx_worker.engine.kernels.delta_rule import Inputs, Kept
from omlx_worker.engine.kernels.forms import Kernels
from omlx_worker.engine.kernels.plain.attention import PlainAttention
from omlx_worker.engine.kernels.plain.delta_rule import PlainRule
from omlx_worker.engine.kernels.plain.net_inputs import NetOperations
from omlx_worker.engine.kernels.plain.products import Product
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.decoding import Loaded, row, run
from tests.helpers.families import tiny

ROWS = [row("a", [1, 2, 3, 4, 5], 24), row("b", list(range(40)), 24)]

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="its kernels are the CPU's forms")


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CACHED", 1 << 12), ("CHAIN", 2), ("LAPS", 1)):
        monkeypatch.setattr(trial, name, value)


def competing(contest: Contest, attention: Attention) -> Kernels:
    """Forms that are right on a CPU, in the place of kernels."""
    return Kernels(
        Contested(PlainAttention(), {"kernel": attention}, contest, ATTENTION),
        Contested(PlainRule(), {"kernel": PlainRule()}, contest, RULE),
        lambda net, fused: _net(net, fused, contest),
    )


def _net(net: Any, fused: Product, contest: Contest) -> Any:
    kernels = {"kernel": NetOperations(net, fused)}
    return Contested(NetOperations(net, fused), kernels, contest, NET)


@on_cpu
def test_every_part_of_a_model_is_decided(qwen: Loaded) -> None:
    contest = Contest()
    wanted = {each.row_id: qwen.greedy(each.prompt, 24) for each in ROWS}

    model = as_ragged(qwen.network, kernels=competing(contest, PlainAttention()))

    assert run(RaggedDecoder(model, 2), ROWS) == wanted
    assert {result.part for result in contest.results} == {
        *("attention", "heads and tail"),
        *("delta rule", "delta rule of prompts", "net inputs", "net output"),
    }
    assert not any(result.faults for result in contest.results)


@on_cpu
@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma3_text", "gpt_oss", "deepseek_v3")
        ),
    ],
)
def test_kernels_that_the_device_does_not_have_leave_the_plain_forms(family: str) -> None:
    contest, network = Contest(), tiny(family)
    wanted = run(RaggedDecoder(as_ragged(network, drafts=False)), ROWS)

    model = as_ragged(network, kernels=competing(contest, AttentionKernel("cuda")), drafts=False)

    assert run(RaggedDecoder(model), ROWS) == wanted
    assert {result.form for result in contest.results} == {"plain"}
    assert all("it fails: " in result.faults["kernel"] for result in contest.results)


@on_cpu
def test_prompts_of_about_one_length_are_one_size(qwen: Loaded) -> None:
    contest = Contest()
    model = as_ragged(qwen.network, kernels=competing(contest, PlainAttention()))
    sizes = []
    for length in (11, 14, 17):
        run(RaggedDecoder(model), [row("a", list(range(length)), 1)])
        sizes.append(len(contest.results))

    assert sizes[0] == sizes[1] == sizes[2]


class Rounding(PlainRule):
    """Rounds the decay to bfloat16."""

    def replay_and_run(
        self, window: Inputs, kept: Kept | None, accepted: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        past = kept and kept._replace(decay=_rounded(kept.decay))
        window = window._replace(decay=_rounded(window.decay))
        return super().replay_and_run(window, past, accepted, state)

    def read(
        self, prompt: Inputs, log_decay: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        return super().read(prompt._replace(decay=_rounded(prompt.decay)), log_decay, state)


def _rounded(decay: mx.array) -> mx.array:
    return decay.astype(mx.bfloat16).astype(mx.float32)


@pytest.mark.parametrize("width", [1, 4])
def test_a_rule_that_rounds_the_decay_to_bfloat16_is_refused(width: int) -> None:
    contest, heads = Contest(), (2, width, 2, 32)
    rule = Contested(PlainRule(), {"kernel": Rounding()}, contest, RULE)
    numbers = mx.zeros(heads, mx.bfloat16)
    gates = mx.zeros(heads[:3])
    window = Inputs(numbers, numbers, numbers, gates, gates.astype(mx.bfloat16))
    state, accepted = mx.zeros((2, 2, 32, 32)), mx.zeros(2, mx.int32)

    rule.read(window, gates, state)
    for kept in (None, window.kept):
        rule.replay_and_run(window, kept, accepted, state)

    assert len(contest.results) == 3
    assert {result.form for result in contest.results} == {"plain"}
    assert all(" off, of " in result.faults["kernel"] for result in contest.results)
