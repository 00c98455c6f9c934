"""A model without a ragged form runs through mlx-lm's BatchGenerator behind the same engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine import generator
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.generator import GeneratorDecoder
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.ragged.sampling import Sampled
from omlx_worker.engine.rows.row import Sampling
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
        GeneratorDecoder(llama.network, max_rows=4),
        [row(str(i), prompt, 30) for i, prompt in enumerate(PROMPTS)],
        arrivals={"1": 4, "3": 11},
    )

    assert got == wanted


def test_a_seeded_row_of_a_llama_draws_the_same_tokens_in_any_company(llama: Loaded) -> None:
    hot = Sampling(temperature=1.0, top_k=40, repetition_penalty=1.2, seed=3)
    alone = run(GeneratorDecoder(llama.network, max_rows=4), [row("x", PROMPTS[0], 25, hot)])

    others = [row(str(i), p, 12, Sampling(seed=i)) for i, p in enumerate(PROMPTS)]
    together = run(GeneratorDecoder(llama.network, 8), [*others, row("x", PROMPTS[0], 25, hot)])

    assert together["x"] == alone["x"]


def test_a_row_can_be_removed_before_and_while_it_decodes(llama: Loaded) -> None:
    decoder = GeneratorDecoder(llama.network, max_rows=4)
    for name in ("waiting", "running", "kept"):
        decoder.add(row(name, PROMPTS[0], 20))
    decoder.remove("waiting")
    decoder.prefill({"running": 8})
    decoder.prefill({"kept": 8})

    first = decoder.step()
    decoder.remove("running")
    rest = [sampled.row_id for _ in range(25) for sampled in decoder.step()]

    assert {sampled.row_id for sampled in first} == {"running", "kept"}
    assert set(rest) == {"kept"}
    assert len(rest) == 19


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
    prompts = {"long": PROMPTS[2], "short": PROMPTS[0]}
    wanted = {name: penalised(llama, prompt, settings) for name, prompt in prompts.items()}
    assert [s.token for s in wanted["long"]] != llama.greedy(prompts["long"], 20)

    for company in (["long"], ["long", "short"]):
        decoder = GeneratorDecoder(llama.network, max_rows=4)
        for name in company:
            decoder.add(row(name, prompts[name], 20, sampling))
            decoder.prefill({name: 100})
        got: dict[str, list[Sampled]] = {name: [] for name in company}
        for step in (step for _ in range(25) for step in decoder.step()):
            got[step.row_id] += step.tokens

        for name in company:
            assert [s.token for s in got[name]] == [s.token for s in wanted[name]]
            assert [s.logprob for s in got[name]] == pytest.approx(
                [s.logprob for s in wanted[name]], abs=1e-3
            )


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, repetition_penalty=1.3, seed=8)])
def test_an_interrupted_row_of_a_llama_goes_on_from_what_it_had_generated(
    llama: Loaded, sampling: Sampling
) -> None:
    whole = row("x", PROMPTS[2], 24, sampling)
    wanted = run(GeneratorDecoder(llama.network, max_rows=4), [whole])["x"]

    for length in (1, 11, 23):
        rest = replace(whole, generated=tuple(wanted[:length]))
        decoder = GeneratorDecoder(llama.network, max_rows=4)
        decoder.add(rest)
        assert decoder.prefill({"x": 8})["x"] == 0
        steps = [step for _ in range(30) for step in decoder.step()]

        assert [token.token for step in steps for token in step.tokens] == wanted[length:]


def test_a_row_of_a_llama_cannot_be_suspended(llama: Loaded) -> None:
    decoder = GeneratorDecoder(llama.network, max_rows=4)
    decoder.add(row("x", PROMPTS[0], 20))
    decoder.prefill({"x": 8})
    decoder.step()

    assert not decoder.suspend("x")
    with pytest.raises(KeyError):
        decoder.resume("x")
    assert len(decoder.step()) == 1
