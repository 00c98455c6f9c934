"""A model without a ragged form runs through mlx-lm's `generate_step` behind the same engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine import generator
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.generator import SerialDecoder
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.rows.row import Sampled, Sampling
from tests.helpers.decoding import Loaded, row, run

PROMPTS = ([5, 6, 7], [9], list(range(40, 75)), [250, 3])


@pytest.fixture(scope="module")
def llama(llama_path: Path) -> Loaded:
    return Loaded.at(llama_path)


def test_a_llama_decodes_greedily_as_mlx_lm_does_with_staggered_arrivals(
    llama: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {str(i): llama.greedy(prompt, 30) for i, prompt in enumerate(PROMPTS)}
    monkeypatch.setattr(generator, "PREFILL_CHUNK", 8)

    got = run(
        SerialDecoder(llama.network),
        [row(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)],
        arrivals={"1": 4, "3": 11},
    )

    assert got == wanted


def test_a_seeded_row_of_a_llama_draws_the_same_tokens_in_any_company(llama: Loaded) -> None:
    hot = Sampling(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=3)
    alone = run(SerialDecoder(llama.network), [row("x", PROMPTS[0], 25, hot)])

    others = [row(str(i), p, 12, Sampling(seed=i)) for i, p in enumerate(PROMPTS)]
    together = run(SerialDecoder(llama.network), [*others, row("x", PROMPTS[0], 25, hot)])

    assert together["x"] == alone["x"]


def test_the_engine_serves_a_llama_like_any_other_model(llama_path: Path) -> None:
    engine: DecodingEngine = load_engine(str(llama_path), max_rows=4)
    request = GenerationRequest(
        model="m", prompt="abc", max_completion_tokens=6, logprobs=True, top_logprobs=2
    )
    [prepared] = engine.prepare(request, "job")
    engine.add(prepared)
    assert engine.prefill({prepared.row_id: 100})[prepared.row_id] == 0

    emissions = [emission for _ in range(10) for emission in engine.step()]

    assert sum(len(emission.tokens) for emission in emissions) <= 6
    assert emissions[-1].finish_reason in {"length", "stop"}
    for emission in emissions:
        assert emission.logprobs is not None
        assert [entry.token_id for entry in emission.logprobs] == emission.tokens
        assert all(len(entry.top) == 2 for entry in emission.logprobs)


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {7: 4.0, 40: -6.0}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 4.0},
    },
}


def penalised(llama: Loaded, prompt: list[int], settings: dict[str, Any]) -> list[Sampled]:
    """The tokens and log-probabilities of mlx-lm's own processors over the whole history."""
    windows = {f"{kind}_context_size": 10_000 for kind in ("repetition", "presence", "frequency")}
    processors = make_logits_processors(**settings, **windows)
    steps = generate_step(
        mx.array(prompt), llama.network, max_tokens=20, logits_processors=processors
    )
    return [Sampled(int(token), logprobs[token].item()) for token, logprobs in steps]


@pytest.mark.parametrize("settings", PENALTIES.values(), ids=PENALTIES)
def test_penalties_act_on_logits_as_those_of_mlx_lm_do(
    llama: Loaded, settings: dict[str, Any]
) -> None:
    sampling = Sampling(temperature=0.0, top_logprobs=0, **settings)
    wanted = penalised(llama, PROMPTS[2], settings)
    assert [s.token for s in wanted] != llama.greedy(PROMPTS[2], 20)

    decoder = SerialDecoder(llama.network)
    decoder.add(row("x", PROMPTS[2], 20, sampling))
    decoder.prefill({"x": 100})
    got = [token for _ in range(21) for step in decoder.step() for token in step.tokens]

    assert [s.token for s in got] == [s.token for s in wanted]
    assert [s.logprob for s in got] == pytest.approx([s.logprob for s in wanted], abs=1e-3)


def test_a_row_of_a_llama_cannot_be_suspended(llama: Loaded) -> None:
    decoder = SerialDecoder(llama.network)
    decoder.add(row("x", PROMPTS[0], 20))
    decoder.prefill({"x": 8})
    decoder.step()

    assert not decoder.suspend("x")
    with pytest.raises(KeyError):
        decoder.resume("x")
    assert len(decoder.step()) == 1
    decoder.remove("x")
    assert decoder.step() == []
